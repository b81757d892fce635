"""The core's two links: to its clients and to its workers."""
