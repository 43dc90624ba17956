import click


@click.command()
def devices() -> None:
    """List the available devices; for a GPU with memory, driver, XMX matrix units and KV cache precision.

    \b
    Example:
      ovspec devices
    """
    from ovspec.ir.device import list_available_devices
    from ovspec.ir.gpu import format_gpu_facts, read_gpu_facts

    devices = list_available_devices()
    for name, description in devices:
        columns = [name, description]
        if device_facts := read_gpu_facts(name):
            columns.append(format_gpu_facts(device_facts))
        click.echo("\t".join(columns))
    if not any(name.startswith("GPU") for name, _ in devices):
        click.echo(
            "No GPU: this machine has no GPU supported by OpenVINO, or its driver is missing "
            "(Linux: intel-opencl-icd; Windows: Intel's graphics driver).",
            err=True,
        )
