"""How the output of a step becomes rows for the clients that own its requests."""
