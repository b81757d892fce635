"""The path of a generation request, whatever its route: body, prompt, sequences, answer."""
