"""Models of the Hugging Face hub: a child of the supervisor fetches them into the hub's cache."""
