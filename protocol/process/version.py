"""The version of the installed package."""


def version() -> str:
    """Return the version, or `0+checkout` where the package is not installed."""
    from importlib import metadata  # it takes long, and few starts need it

    try:
        return metadata.version("troika")
    except metadata.PackageNotFoundError:
        return "0+checkout"
