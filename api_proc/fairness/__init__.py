"""The order in which the clients of the API get what they share."""
