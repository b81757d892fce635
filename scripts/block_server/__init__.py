"""The block server: it lets workers of other machines read the KV blocks of this one."""
