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
    names = {"s": "seconds", "suffix: /s": "per second", "reqps": "requests per second", "bytes": "bytes", "Bps": "bytes per second",
             "percentunit": "share", "short": ""}
    return names.get(unit, unit)


def filled_in(expr):
    for name, value in {"$__rate_interval": "20s", "$queue": ".*", "$instance": ".*"}.items():
        expr = expr.replace(name, value)
    return expr


def shown(value, defaults):
    """A stat's value as Grafana writes it."""
    for mapping in defaults.get("mappings", []):
        if f"{value:g}" in mapping["options"]:
            return mapping["options"][f"{value:g}"]["text"]
    return f"{value * 100:.3g} %" if defaults["unit"] == "percentunit" else f"{value:.3g} {in_unit(defaults['unit'])}"


def draw_stat(axes, panel, prometheus, seconds):
    """The last value of the first series, on the colour of its threshold."""
    defaults = panel["fieldConfig"]["defaults"]
    target = panel["targets"][0]
    found = ask(prometheus, filled_in(target["expr"]), seconds)
    values = [(float(it["values"][-1][1]), legend(target["legendFormat"], it["metric"])) for it in found]
    axes.axis("off")
    axes.set_title(panel["title"], fontsize=10, loc="left")
    if not values:
        return 0
    value, name = max(values)
    colour = [it["color"] for it in defaults["thresholds"]["steps"] if it["value"] is None or value >= it["value"]][-1]
    box = {"facecolor": {"green": "#73bf69", "orange": "#ff9830", "red": "#f2495c"}[colour], "boxstyle": "round", "edgecolor": "none"}
    axes.text(0.5, 0.5, shown(value, defaults), fontsize=17, ha="center", va="center", bbox=box)
    axes.text(0.5, 0.08, name, fontsize=8, ha="center", va="center")
    return len(values)


def draw(axes, panel, prometheus, seconds):
    if panel["type"] == "stat":
        return draw_stat(axes, panel, prometheus, seconds)
    axes.set_title(panel["title"], fontsize=10, loc="left")
    axes.set_ylabel(in_unit(panel["fieldConfig"]["defaults"]["unit"]), fontsize=8)
    lines = 0
    for target in panel["targets"]:
        for series in ask(prometheus, filled_in(target["expr"]), seconds):
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
    rows, titles = {}, {}
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        if panel["type"] == "row":
            titles[place["y"] + place["h"]] = panel["title"]
        else:
            rows.setdefault(place["y"], []).append(panel)
    heights = [1.3 if all(it["type"] == "stat" for it in panels) else 3.4 for _, panels in sorted(rows.items())]
    figure = plot.figure(figsize=(18, sum(heights) + 0.4), layout="constrained")
    figure.suptitle(dashboard["title"], fontsize=14)
    parts = figure.subfigures(len(rows), 1, height_ratios=heights)
    for part, (top, panels) in zip(parts, sorted(rows.items())):
        part.suptitle(titles.get(top, ""), fontsize=11, x=0.01, ha="left")
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
