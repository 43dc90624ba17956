import click


@click.command()
def devices() -> None:
    """List the devices that a model can run on, and a GPU's memory, driver, matrix unit (XMX) and KV cache.

    \b
    Example:
      ovspec devices
    """
    from ovspec.ir.device import list_available_devices
    from ovspec.ir.gpu import format_gpu_facts, read_gpu_facts

    listed = list_available_devices()
    for name, description in listed:
        facts = read_gpu_facts(name)
        click.echo(f"{name}\t{description}" + (f"\t{format_gpu_facts(facts)}" if facts else ""))
    if not any(name.startswith("GPU") for name, _ in listed):
        click.echo(
            "No GPU: either there is none that OpenVINO can use, or its driver is missing "
            "(Linux: intel-opencl-icd; Windows: Intel's graphics driver).",
            err=True,
        )
