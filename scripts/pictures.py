#!/usr/bin/env python3
"""Draws the dashboards as Grafana would. Queries a Prometheus for each panel's expressions over the
last seconds, and writes one picture per dashboard to docs/pictures/. `scripts/pictures.sh` runs it
against a server under load."""

import json
import pathlib
import sys
import time
import urllib.parse
import urllib.request

import matplotlib

matplotlib.use("Agg")
import matplotlib.dates  # noqa: E402
import matplotlib.pyplot as plot  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Points per line.
STEPS = 120


def ask(prometheus, expr, seconds):
    end = time.time()
    query = urllib.parse.urlencode({"query": expr, "start": end - seconds, "end": end, "step": seconds / STEPS})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{query}") as answer:
        return json.load(answer)["data"]["result"]


def legend(text, labels):
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def in_unit(unit):
    names = {"s": "seconds", "ops": "per second", "reqps": "requests per second", "bytes": "bytes", "Bps": "bytes per second",
             "percentunit": "share", "short": ""}
    return names.get(unit, unit)


def draw(axes, panel, prometheus, seconds):
    axes.set_title(panel["title"], fontsize=10, loc="left")
    axes.set_ylabel(in_unit(panel["fieldConfig"]["defaults"]["unit"]), fontsize=8)
    lines = 0
    for target in panel["targets"]:
        expr = target["expr"].replace("$__rate_interval", "20s").replace("$queue", ".*")
        for series in ask(prometheus, expr, seconds):
            points = [(float(at), float(value)) for at, value in series["values"] if value != "NaN"]
            if not points:
                continue
            times = [matplotlib.dates.epoch2num(at) if hasattr(matplotlib.dates, "epoch2num") else at / 86400 for at, _ in points]
            axes.plot(times, [value for _, value in points], linewidth=1.2, label=legend(target["legendFormat"], series["metric"]))
            lines += 1
    axes.xaxis.set_major_formatter(matplotlib.dates.DateFormatter("%H:%M:%S"))
    axes.xaxis.set_major_locator(plot.MaxNLocator(4))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    axes.set_ylim(bottom=0)
    if 0 < lines:
        axes.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=4, frameon=False)
    return lines


def picture(path, prometheus, seconds, target):
    dashboard = json.loads(path.read_text())
    rows = {}
    for panel in dashboard["panels"]:
        rows.setdefault(panel["gridPos"]["y"], []).append(panel)
    figure = plot.figure(figsize=(18, 3.4 * len(rows)), layout="constrained")
    figure.suptitle(dashboard["title"], fontsize=14)
    parts = figure.subfigures(len(rows), 1)
    for part, (_, panels) in zip(parts, sorted(rows.items())):
        for axes, panel in zip(part.subplots(1, len(panels), squeeze=False)[0], panels):
            if draw(axes, panel, prometheus, seconds) == 0:
                raise SystemExit(f"{dashboard['title']}: {panel['title']} has no data")
    figure.savefig(target, dpi=60)
    plot.close(figure)
    print(target)


def main():
    prometheus, seconds = sys.argv[1], int(sys.argv[2])
    folder = ROOT / "docs/pictures"
    folder.mkdir(exist_ok=True)
    for path in sorted((ROOT / "ops/grafana/dashboards").glob("*.json")):
        picture(path, prometheus, seconds, folder / f"{path.stem}.png")


main()
