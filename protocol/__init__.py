"""What the processes share: messages, configuration, channels, child processes and the client."""
