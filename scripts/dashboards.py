#!/usr/bin/env python3
"""Generates the Grafana dashboards: ops/grafana/dashboards/*.json for operators, and
ops/grafana/project.json, which the API fills with a project's queues. A dashboard is a list of
rows, and a row is a list of panels. Edit the panels only here."""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
RATE = "$__rate_interval"
# Width of a row in grid columns, shared by its panels.
GRID = 24
# Heights in grid rows.
GRAPH, STAT, TITLE = 8, 4, 1
PER_SECOND = "suffix: /s"
# Colours of a stat: from 0, from the first and from the second of its two thresholds.
COLOURS = ("green", "orange", "red")


def panel(title, unit, *series, about="", stack=False, kind="timeseries"):
    """A panel. Each of `series` is an expression and its legend."""
    return {"title": title, "unit": unit, "series": series, "about": about, "stack": stack, "kind": kind}


def stat(title, unit, thresholds, *series, about="", words=None):
    """The present value, coloured by two thresholds; `words` for values that are no numbers."""
    return panel(title, unit, *series, about=about, kind="stat") | {"thresholds": thresholds, "words": words}


def rate(metric, by=""):
    return f"sum{f' by ({by})' if by else ''} (rate({metric}[{RATE}]))"


def share(metric, quantile, by=""):
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({quantile}, sum by ({labels}) (rate({metric}_bucket[{RATE}])))"


def shares(metric, by=""):
    named = f"{{{{{by}}}}} " if by else ""
    return [(share(metric, it, by), f"{named}p{round(it * 100)}") for it in (0.5, 0.95, 0.99)]


OVERVIEW = [
    ("Now", [
        stat("Canary misses in a row", "short", (1, 3), ("max(fencepost_canary_consecutive_misses)", "misses"),
             about="The server's own job, on the worst node."),
        stat("Oldest ready job", "s", (60, 300),
             ("sort_desc(max by (reason) (fencepost_oldest_ready_age_seconds) > 0) or vector(0)", "{{reason}}"),
             about="By the reason why it waits. Reasons of a tenant's own making need no operator."),
        stat("Server errors", "percentunit", (0.001, 0.01),
             (f'(sum(rate(fencepost_http_requests_total{{status=~"5.."}}[{RATE}])) or vector(0)) / '
              f"sum(rate(fencepost_http_requests_total[{RATE}]))", "of all requests")),
        stat("Nodes", "short", (), ("count(fencepost_build_info)", "nodes")),
        stat("Redis", "short", (0.5, 1), ("max(fencepost_redis_breaker_open)", "breaker"),
             words={"0": "in use", "1": "not reached"}, about="Without Redis, limits are counted by each node."),
        stat("PostgreSQL connections", "percentunit", (0.8, 0.95),
             ("max(fencepost_postgres_connections) / max(fencepost_postgres_max_connections)", "of the maximum")),
    ]),
    ("Canary", [
        panel("Canary", "s", *shares("fencepost_canary_duration_seconds"),
              about="Time of the server's own job through enqueue, claim and ack, on each node."),
        panel("Canaries missed in a row", "short", ("fencepost_canary_consecutive_misses", "{{instance}}"),
              about="Page when it is 3 or more on most nodes."),
        panel("Canaries", PER_SECOND, (rate("fencepost_canary_runs_total", "outcome"), "{{outcome}}")),
        panel("Pickup time", "s", *shares("fencepost_job_pickup_seconds"),
              about="Time from when a job could first run to its first lease."),
    ]),
    ("Jobs", [
        panel("Jobs", PER_SECOND, (rate("fencepost_jobs_enqueued_total"), "enqueued"),
              (rate("fencepost_jobs_claimed_total"), "claimed"), (rate("fencepost_jobs_settled_total"), "settled"),
              (rate("fencepost_jobs_matched_total"), "leased as they were stored")),
        panel("Attempts ended", PER_SECOND, (rate("fencepost_jobs_settled_total", "outcome"), "{{outcome}}"), stack=True),
        panel("Live jobs", "short", ("max by (state) (fencepost_jobs)", "{{state}}")),
    ]),
    ("Requests", [
        panel("Requests by status", "reqps", (rate("fencepost_http_requests_total", "status"), "{{status}}"), stack=True),
        panel("Server errors", PER_SECOND,
              (f'sum(rate(fencepost_http_requests_total{{status=~"5.."}}[{RATE}])) or vector(0)', "5xx")),
        panel("Nodes", "short", ("count(fencepost_build_info) by (version)", "{{version}}"),
              ("max(fencepost_nodes)", "seen by the nodes"), stack=False),
        panel("Zone rules", "short", ("count(fencepost_zone_rules_info == 1) by (release)", "{{release}}"),
              about="Nodes by the release of time zone rules that they use."),
        panel("Age of the zone rules", "s", ("time() - min(fencepost_zone_rules_published_seconds)", "oldest"),
              about="Update tzdata before they are a year old."),
    ]),
    ("Process", [
        panel("Response time, without polls", "s",
              *[(f'histogram_quantile({it}, sum by (le) (rate(fencepost_http_request_duration_seconds_bucket'
                 f'{{group!~"poll|stream"}}[{RATE}])))', f"p{round(it * 100)}")
                for it in (0.5, 0.95, 0.99)]),
        panel("CPU", "short", (f"rate(process_cpu_seconds_total[{RATE}])", "{{instance}}"),
              about="Cores that each node uses."),
        panel("Memory", "bytes", ("process_resident_memory_bytes", "{{instance}}")),
        panel("File descriptors", "percentunit", ("process_open_fds / process_max_fds", "{{instance}}"),
              about="Share of those that the process may open. Each parked poll has one."),
        panel("Threads", "short", ("process_threads", "{{instance}}")),
        panel("Uptime", "s", ("time() - process_start_time_seconds", "{{instance}}")),
        panel("Panics", "short", ("sum(fencepost_panics_total)", "since the start"), about="Must stay 0."),
    ]),
]

WORK = [
    ("Waiting", [
        panel("Oldest ready job", "s", ("max by (reason) (fencepost_oldest_ready_age_seconds)", "{{reason}}")),
        panel("Pickup time", "s", *shares("fencepost_job_pickup_seconds")),
        panel("Run time", "s", *shares("fencepost_job_run_seconds")),
    ]),
    ("Polls", [
        panel("Parked polls", "short", ("sum(fencepost_polls_parked)", "all nodes"),
              ("max(fencepost_polls_parked)", "fullest node")),
        panel("Released", PER_SECOND, (rate("fencepost_jobs_released_total"), "client disconnected")),
        panel("Promoted", PER_SECOND, (rate("fencepost_jobs_promoted_total"), "became due"),
              (rate("fencepost_group_jobs_opened_total"), "next of their group")),
        panel("Checkpoints", PER_SECOND, (rate("fencepost_checkpoints_total", "outcome"), "{{outcome}}")),
        panel("Rate limits met by workers", PER_SECOND,
              (rate("fencepost_rate_limit_pauses_total", "scope"), "{{scope}} paused")),
    ]),
    ("Failures", [
        panel("Retries, dead letters, cancellations", PER_SECOND, (rate("fencepost_jobs_retried_total"), "retried"),
              (rate("fencepost_jobs_dead_lettered_total"), "dead-lettered"),
              (rate("fencepost_jobs_cancelled_total"), "cancelled")),
        panel("Leases lost", PER_SECOND,
              (f'sum by (outcome) (rate(fencepost_jobs_settled_total{{outcome=~"lease_expired|timeout"}}[{RATE}]))',
               "{{outcome}}"),
              (rate("fencepost_jobs_lost_total"), "jobs lost"),
              (rate("fencepost_workers_lost_total"), "workers lost"),
              (rate("fencepost_leases_rearmed_total"), "re-armed after a gap")),
        panel("Fences refused", PER_SECOND, (rate("fencepost_fences_refused_total", "reason"), "{{reason}}")),
    ]),
    ("Schedules and bulk work", [
        panel("Recurring schedules", PER_SECOND, (rate("fencepost_schedule_fires_total", "outcome"), "{{outcome}}")),
        panel("Schedule lateness", "s", *shares("fencepost_schedule_lateness_seconds")),
        panel("Circuit breakers and bulk work", PER_SECOND, (rate("fencepost_brakes_total"), "job types paused"),
              (rate("fencepost_operation_jobs_total"), "jobs processed in bulk"),
              (rate("fencepost_jobs_pruned_total"), "pruned")),
    ]),
]

STORE = [
    ("Batches", [
        panel("Batch size", "short", (share("fencepost_batch_items", 0.5, "kind"), "{{kind}} p50"),
              (share("fencepost_batch_items", 0.99, "kind"), "{{kind}} p99")),
        panel("Batch wait", "s", (share("fencepost_batch_wait_seconds", 0.99, "kind"), "{{kind}} p99")),
        panel("Batch duration", "s", (share("fencepost_batch_duration_seconds", 0.99, "kind"), "{{kind}} p99")),
    ]),
    ("Connections", [
        panel("Wait for a connection", "s", (share("fencepost_pool_wait_seconds", 0.99, "pool"), "{{pool}} p99")),
        panel("Node connections", "short", ('sum by (pool) (fencepost_pool_connections{state="used"})', "{{pool}} in use"),
              ("sum(fencepost_pool_connections)", "open")),
        panel("Server connections", "short", ("max(fencepost_postgres_connections)", "open"),
              ("max(fencepost_postgres_max_connections)", "maximum")),
    ]),
    ("PostgreSQL", [
        panel("Store errors", PER_SECOND, (rate("fencepost_store_errors_total", "kind"), "{{kind}}")),
        panel("Transactions", PER_SECOND, (f"max(rate(fencepost_postgres_commits_total[{RATE}]))", "commits"),
              (f"max(rate(fencepost_postgres_deadlocks_total[{RATE}]))", "deadlocks")),
        panel("WAL written", "Bps", (f"max(rate(fencepost_postgres_wal_bytes_total[{RATE}]))", "written")),
        panel("WAL retained by a slot", "bytes", ("max(fencepost_postgres_held_wal_bytes)", "retained")),
        panel("Standbys", "short", ("max(fencepost_postgres_standbys)", "streaming")),
        panel("Archive refuses WAL", "s", ("max(fencepost_postgres_archive_failing_seconds)", "since")),
    ]),
    ("Tables", [
        panel("Dead rows", "short", ("topk(8, max by (table) (fencepost_postgres_dead_rows))", "{{table}}")),
        panel("Oldest snapshot", "s", ("max(fencepost_postgres_oldest_snapshot_seconds)", "age"),
              about="While a snapshot is held, vacuum cannot remove dead rows."),
        panel("Oldest snapshot in transactions", "short",
              ("max(fencepost_postgres_oldest_snapshot_transactions)", "transactions")),
        panel("Size", "bytes", ("topk(10, max by (table, part) (fencepost_postgres_table_bytes))", "{{table}} {{part}}")),
    ]),
    ("Loops", [
        panel("Slowest loop steps", "s", (f'topk(6, {share("fencepost_loop_duration_seconds", 0.99, "loop")})', "{{loop}} p99")),
        panel("Loop lateness", "s", (f'topk(6, {share("fencepost_loop_lateness_seconds", 0.99, "loop")})', "{{loop}} p99")),
        panel("Time since last completed step", "s", ("topk(6, max by (loop) (time() - fencepost_loop_last_step_timestamp_seconds))", "{{loop}}")),
        panel("Items set aside", "short", ("max by (work) (fencepost_set_aside_items)", "{{work}}")),
        panel("Replaced connections", "short", ("sum(increase(fencepost_pools_renewed_total[$__rate_interval]))", "times")),
        panel("Failed loop steps", PER_SECOND, (rate("fencepost_loop_errors_total", "loop"), "{{loop}}")),
    ]),
]

LIMITS = [
    ("Limits", [
        panel("Refused by limits", PER_SECOND, (rate("fencepost_requests_limited_total", "budget"), "{{budget}}"),
              (rate("fencepost_spans_dropped_total"), "spans dropped")),
        panel("Limiter decisions", PER_SECOND, (rate("fencepost_limiter_decisions_total", "by, outcome"), "{{by}} {{outcome}}")),
        panel("Requests shed", PER_SECOND, (rate("fencepost_requests_shed_total", "kind"), "{{kind}}"),
              about="Requests refused with 503 because a bounded queue was full."),
    ]),
    ("Redis", [
        stat("Redis", "short", (0.5, 1), ("max(fencepost_redis_breaker_open)", "breaker"),
             words={"0": "in use", "1": "not reached"}),
        stat("Subscribed nodes", "percentunit", (), ("avg(fencepost_redis_subscribed)", "of all nodes"),
             about="Nodes that hear wake-ups of others."),
        panel("Redis failures", PER_SECOND, (rate("fencepost_redis_failures_total", "reason"), "{{reason}}"),
              (rate("fencepost_limits_local_total"), "limits counted locally")),
        panel("Wake-ups between nodes", PER_SECOND, (rate("fencepost_wakeups_sent_total"), "sent"),
              (rate("fencepost_wakeups_received_total"), "received")),
    ]),
    ("HTTP and mail", [
        panel("Connections", "short", ("sum(fencepost_http_connections)", "open")),
        panel("Connections refused", PER_SECOND, (rate("fencepost_http_connections_refused_total"), "refused")),
        panel("Requests by route", "reqps", (f"topk(10, {rate('fencepost_http_requests_total', 'route')})", "{{route}}")),
        panel("Mail", PER_SECOND, (rate("fencepost_mails_total", "outcome"), "{{outcome}}")),
    ]),
    ("Webhooks", [
        panel("Tries", PER_SECOND, (rate("fencepost_webhook_deliveries_total", "outcome"), "{{outcome}}")),
        panel("Time of a request", "s", *shares("fencepost_webhook_duration_seconds")),
        panel("Event to first try", "s", *shares("fencepost_webhook_delay_seconds")),
        panel("Requests under way", "short", ("sum(fencepost_webhooks_in_flight)", "requests"),
              ("max(fencepost_webhook_endpoints)", "endpoints"),
              ("max(fencepost_pushed_queues)", "pushed queues")),
        panel("Events dropped", PER_SECOND, (rate("fencepost_events_dropped_total"), "events")),
    ]),
]

# The labels of a project's own metrics. The server fills in the slug.
OF = '{project="PROJECT_SLUG", queue=~"$queue"}'
PROJECT = [
    ("Waiting", [
        panel("Oldest ready job", "s", (f"fencepost_project_queue_oldest_ready_age_seconds{OF}", "{{queue}}"),
              about="Age of the oldest ready job."),
        panel("Why the oldest waits", "s", (f"fencepost_project_oldest_ready_seconds{OF}", "{{queue}}: {{reason}}"),
              about="The queues that wait longest, from 30 seconds on. Page on this metric."),
        panel("Ready", "short", ('fencepost_project_queue_jobs{project="PROJECT_SLUG", queue=~"$queue", state="ready"}', "{{queue}}")),
        panel("Workers", "short", (f"fencepost_project_queue_workers{OF}", "{{queue}}")),
    ]),
    ("Throughput", [
        panel("Enqueued", PER_SECOND, (f"sum by (queue) (rate(fencepost_project_jobs_enqueued_total{OF}[{RATE}]))", "{{queue}}")),
        panel("Claimed", PER_SECOND, (f"sum by (queue) (rate(fencepost_project_jobs_claimed_total{OF}[{RATE}]))", "{{queue}}")),
        panel("Attempts ended", PER_SECOND,
              (f"sum by (outcome) (rate(fencepost_project_attempts_total{OF}[{RATE}]))", "{{outcome}}"), stack=True),
        panel("Dead-lettered and cancelled", PER_SECOND,
              (f"sum by (job_type) (rate(fencepost_project_jobs_dead_lettered_total{OF}[{RATE}]))", "{{job_type}} dead-lettered"),
              (f"sum(rate(fencepost_project_jobs_cancelled_total{OF}[{RATE}]))", "cancelled")),
    ]),
    ("Times and states", [
        panel("Wait time", "s", *[(f"histogram_quantile({it}, sum by (le, queue) (rate(fencepost_project_job_wait_seconds_bucket"
                              f"{OF}[{RATE}])))", f"{{{{queue}}}} p{round(it * 100)}") for it in (0.5, 0.99)]),
        panel("Run time", "s", *[(f"histogram_quantile({it}, sum by (le, job_type) (rate("
                             f'fencepost_project_job_run_seconds_bucket{{project="PROJECT_SLUG"}}[{RATE}])))', f"{{{{job_type}}}} p{round(it * 100)}")
                            for it in (0.5, 0.99)]),
        panel("Jobs by state", "short", (f"sum by (state) (fencepost_project_queue_jobs{OF})", "{{state}}"), stack=True),
        panel("Paused", "short", (f"fencepost_project_queue_paused{OF}", "{{queue}}")),
    ]),
]


def of_instance(expr):
    """The expression for the nodes that are chosen above."""
    chosen = 'instance=~"$instance"'

    def choose(found):
        name, matchers = found.group(1), found.group(3)
        return f"{name}{{{chosen}, {matchers}}}" if matchers else f"{name}{{{chosen}}}"

    return re.sub(r"\b((?:fencepost|process)_\w+)(\{([^}]*)\})?", choose, expr)


def to_panel(number, place, it, is_of_nodes):
    source = {"type": "prometheus", "uid": "${datasource}"}
    is_stat = it["kind"] == "stat"
    custom = {"fillOpacity": 10, "showPoints": "never"}
    if it["stack"]:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults = {"unit": it["unit"], "min": 0}
    if is_stat:
        limits = (None, *it["thresholds"])
        defaults["thresholds"] = {"mode": "absolute", "steps": [{"color": colour, "value": limit} for colour, limit in zip(COLOURS, limits)]}
        if it["words"]:
            options = {value: {"text": text, "index": index} for index, (value, text) in enumerate(it["words"].items())}
            defaults["mappings"] = [{"type": "value", "options": options}]
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background", "graphMode": "area", "textMode": "auto"}
    else:
        defaults["custom"] = custom
        legend = {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]}
        options = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    return {
        "id": number,
        "title": it["title"],
        "description": it["about"],
        "type": it["kind"],
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + index), "expr": of_instance(expr) if is_of_nodes else expr,
             "legendFormat": legend, "datasource": source}
            for index, (expr, legend) in enumerate(it["series"])
        ],
    }


def to_panels(rows, is_of_nodes):
    panels, top = [], 0
    for title, its in rows:
        panels.append({"id": len(panels) + 1, "title": title, "type": "row", "collapsed": False, "panels": [], "targets": [],
                       "gridPos": {"h": TITLE, "w": GRID, "x": 0, "y": top}})
        top += TITLE
        height = STAT if all(it["kind"] == "stat" for it in its) else GRAPH
        width = GRID // len(its)
        for column, it in enumerate(its):
            place = {"h": height, "w": width, "x": column * width, "y": top}
            panels.append(to_panel(len(panels) + 1, place, it, is_of_nodes))
        top += height
    return panels


# A version that was not there a minute ago, on any node.
DEPLOY = "count by (version) (fencepost_build_info) unless count by (version) (fencepost_build_info offset 1m)"


def dashboard(uid, title, rows, variables=(), is_of_nodes=True):
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}
    deploys = {"name": "Deploys", "enable": True, "iconColor": "blue", "expr": DEPLOY, "step": "60s", "titleFormat": "{{version}}",
               "datasource": {"type": "prometheus", "uid": "${datasource}"}}
    return {
        "uid": uid,
        "title": title,
        "tags": ["fencepost"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "editable": True,
        "templating": {"list": [source, *([INSTANCE] if is_of_nodes else []), *variables]},
        "annotations": {"list": [deploys] if is_of_nodes else []},
        "links": [{"type": "dashboards", "tags": ["fencepost"], "title": "Fencepost", "asDropdown": True, "keepTime": True}],
        "panels": to_panels(rows, is_of_nodes),
    }


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def variable(name, label, query):
    return {"name": name, "label": label, "type": "query", "multi": True, "includeAll": True, "allValue": ".*",
            "datasource": {"type": "prometheus", "uid": "${datasource}"}, "refresh": 2, "sort": 1,
            "query": {"query": query, "refId": name}, "current": {"selected": True, "text": ["All"], "value": ["$__all"]}}


# Read when the dashboard is opened and when its time range changes: a new queue is there at once.
QUEUE = variable("queue", "Queue", 'label_values(fencepost_project_queue_jobs{project="PROJECT_SLUG"}, queue)')
INSTANCE = variable("instance", "Node", "label_values(fencepost_build_info, instance)")
folder = ROOT / "ops/grafana/dashboards"
write(folder / "overview.json", dashboard("fencepost-overview", "Fencepost: overview", OVERVIEW))
write(folder / "queues-and-workers.json", dashboard("fencepost-work", "Fencepost: queues and workers", WORK))
write(folder / "store-and-loops.json", dashboard("fencepost-store", "Fencepost: store and loops", STORE))
write(folder / "limits.json", dashboard("fencepost-limits", "Fencepost: limits", LIMITS))
write(ROOT / "ops/grafana/project.json", dashboard("fencepost-project", "Fencepost: project", PROJECT, [QUEUE], is_of_nodes=False))
