"""HTTP/1.1: the server, its connections, and what each request passes before its handler."""
