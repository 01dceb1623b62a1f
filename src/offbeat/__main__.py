"""Entry point of ``offbeat`` and of ``python -m offbeat``."""

from offbeat.kit.imports import quiet_imports


def main() -> None:
    """Run the command line."""
    with quiet_imports():
        from offbeat.cli import app
    app(prog_name="offbeat")


if __name__ == "__main__":
    main()
