import click


@click.command()
def devices() -> None:
    """List the devices that a model can run on.

    \b
    Example:
      ovspec devices
    """
    from ovspec.ir.device import available_devices

    listed = available_devices()
    for name, description in listed:
        click.echo(f"{name}\t{description}")
    if not any(name.startswith("GPU") for name, _ in listed):
        click.echo(
            "No GPU: either there is none that OpenVINO can use, or its driver is missing "
            "(Linux: intel-opencl-icd; Windows: Intel's graphics driver).",
            err=True,
        )
