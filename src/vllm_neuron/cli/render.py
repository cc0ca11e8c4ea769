"""How a doctor's report is printed."""

import json
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_neuron.cli.report import Report
from vllm_neuron.cli.tables import new_table, result_console

_YES, _NO = "[green]yes[/green]", "[red]no[/red]"


def as_json(report: Report) -> str:
    """The report as one JSON object."""
    document = asdict(report) | {
        "kernels": [choice._asdict() for choice in report.kernels],
        "environment": {row.name: {"value": row.value, "source": row.source} for row in report.environment},
        "healthy": report.healthy,
    }
    return json.dumps(document, indent=2)


def show(report: Report, console: Console | None = None) -> None:
    """Print the report for people."""
    console = console or result_console()
    _heading(console, "Platform")
    console.print(f"vLLM uses this plugin: {_YES if report.platform.active else _NO} (mode: {report.platform.mode})")
    for reason in report.platform.reasons:
        console.print(f"  {escape(reason)}")

    _heading(console, "Compile routes")
    for route in report.routes:
        mark = " (selected)" if route.selected else ""
        console.print(f"{route.name}{mark}: works: {_YES if route.works else _NO}")
        console.print(f"  {escape(route.reason)}")

    _heading(console, "Ops")
    table = new_table("op", "implementation", "why")
    for choice in report.kernels:
        table.add_row(*map(escape, choice))
    console.print(table)

    _heading(console, "Devices")
    console.print("\n".join(report.devices) or "no /dev/neuron*")

    _heading(console, "Packages")
    table = Table.grid(padding=(0, 2))
    for package in report.packages:
        note = "[yellow]empty placeholder from PyPI, not the real package[/yellow]" if package.stub else ""
        table.add_row(package.name, package.version or "not installed", note)
    console.print(table)

    _heading(console, "Compile cache")
    cache = report.cache
    console.print(escape(cache.path))
    state = f"{cache.entries} graphs, {cache.num_bytes / 2**20:.1f} MiB" if cache.exists else "does not exist yet"
    console.print(f"  {state}, writable: {_YES if cache.writable else _NO}")

    _heading(console, "Environment")
    width = max((len(row.name) for row in report.environment), default=0)
    for row in report.environment:
        value = "not set" if row.value is None else str(row.value)
        source = "" if row.source == "default" else f"  (from {row.source})"
        console.print(f"{row.name:<{width}}  {escape(value)}{source}")

    for warning in report.warnings:
        console.print(f"[yellow]Warning:[/yellow] {escape(warning)}")
    console.print()
    console.print(
        "[green]The selected route works here.[/green]"
        if report.healthy
        else "[red]The selected route does not work here.[/red]"
    )


def _heading(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")
