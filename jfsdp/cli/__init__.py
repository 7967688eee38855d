"""`python -m jfsdp`: what a training step costs on devices that need not be here."""

from jfsdp.cli.commands import main as main
