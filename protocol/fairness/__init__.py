"""How the clients of an engine share what is limited: in turns, and within shares."""
