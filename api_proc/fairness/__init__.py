"""What the clients of the API share: how much each may take of it, and in which order."""
