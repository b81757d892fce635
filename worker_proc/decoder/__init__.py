"""Decoder layers as a program that one native call executes, proven against their modules."""
