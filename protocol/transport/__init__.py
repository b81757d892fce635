"""How frames travel: channels over ZMQ sockets, multipart messages, sequence numbers."""
