//! What a project used, by month and by day, and the operator's table of it.

use fencepost_domain::{ids::ProjectId, usage::Used};
use fencepost_engine::{Engine, maintenance::byte_hours};
use fencepost_store::{people::usage::add, sweep::usage::fold_days};
use serde_json::{Value, json};

use crate::{
    harness::{Database, eventually, fresh_database, limited, run, run_alone},
    people::security::{operate, printed},
};

/// Amounts, in the order of the API's fields.
const AMOUNTS: &[&str] = &[
    "jobs_enqueued",
    "attempts",
    "jobs_succeeded",
    "jobs_dead_lettered",
    "requests",
    "poll_seconds",
    "log_bytes",
    "stored_byte_hours",
];

fn amounts(of: &Value) -> Vec<i64> {
    AMOUNTS.iter().map(|it| of[it].as_i64().expect("a number")).collect()
}

#[test]
fn usage_is_added_up_by_day_and_by_month() {
    run(async |t| {
        let id = t.enqueue(json!({"job_type": "a"})).await;
        let leased = t.lease("w").await;
        let log = json!({"worker_id": "w", "chunks": [
            {"job_id": id, "attempt": 1, "sequence": 0, "data": "y".repeat(2_000),
             "timestamp_ms": 1},
        ]});
        t.post("/v1/workers/logs", log.clone()).await.is(200);
        // It was stored before.
        t.post("/v1/workers/logs", log).await.is(200);
        t.ack(&leased, "w", "succeeded").await.is(200);
        let waits = json!({"worker_id": "w", "queues": ["none"], "wait_seconds": 1});
        assert!(t.polled(waits).await.is_empty());
        let usage = eventually("all of it to be counted", async || {
            let usage = t.get("/v1/usage").await.is(200);
            let is_counted = usage["jobs_succeeded"] == 1 && usage["poll_seconds"] != 0;
            (is_counted && usage["live_jobs"] == 0).then_some(usage)
        })
        .await;
        let [enqueued, attempts, _, dead, requests, _, log_bytes, _] = amounts(&usage)[..] else {
            panic!("{usage}")
        };
        assert_eq!((enqueued, attempts, dead, log_bytes), (1, 1, 0, 2_000));
        assert!((6..1_000).contains(&requests), "{requests}");
        let days = usage["days"].as_array().expect("days");
        let of_job = days.iter().find(|it| it["jobs_succeeded"] == 1).expect("its day");
        assert_eq!((&of_job["log_bytes"], &of_job["attempts"]), (&json!(2_000), &json!(1)));
        let month = usage["month"].as_str().expect("a month");
        assert!(of_job["day"].as_str().expect("a day").starts_with(month), "{of_job}");
        let same = t.get(&format!("/v1/usage?month={month}")).await.is(200);
        assert_eq!(same["jobs_enqueued"], 1);
        let none = t.get("/v1/usage?month=2001-01").await.is(200);
        assert_eq!((&none["jobs_enqueued"], &none["days"]), (&json!(0), &json!([])));
        t.get("/v1/usage?month=2001-13").await.refuses("month");
        t.get("/v1/usage?year=2001").await.refuses("year");
    });
}

async fn drain(engine: &Engine) {
    while byte_hours::pass(engine).await.expect("it runs") {}
}

#[test]
fn stored_bytes_count_once_an_hour_on_any_number_of_nodes() {
    limited(async {
        let database = fresh_database().await;
        // More than two pages; the last one is the outbox of the first, and stores for it.
        let fill = "
            insert into projects (id, public_id, slug, name, plan, mode, kind, owner_project_id)
            overriding system value
            select n, gen_random_uuid(), 'p' || n, 'p', 'unlimited', 'live',
                   case n when 2500 then 'outbox' when 2499 then 'canary' else 'user' end,
                   case n when 2500 then 1 end
            from generate_series(1, 2500) n;
            insert into queue_counts (project_id, queue, active)
            select n, 'q' || q, 1 from generate_series(1, 2500) n, generate_series(1, 2) q
            where n <> 7;
            insert into stored_bytes (project_id, bytes) select n, 100 from generate_series(1, 9) n;
            update queue_counts set active = 0 where project_id = 8;
            update stored_bytes set bytes = 0 where project_id = 8";
        database.execute(fill).await;
        // An hour that is still to come: no other one begins while this runs.
        let begin = "update usage_hour
                     set hour = date_trunc('hour', now()) + interval '1 day', after_project = 0";
        let nodes = [database.engine(), database.engine()];
        let bytes = async |project: i32| {
            let sum = "select coalesce(sum(byte_hours), 0)::bigint from usage_days";
            database.number(&format!("{sum} where project_id = {project}")).await
        };
        let rows = "select count(*) from usage_days";
        for hours in 1..=2 {
            database.execute(begin).await;
            tokio::join!(drain(&nodes[0]), drain(&nodes[1]));
            // The other one may have left while this one still had the last page.
            drain(&nodes[0]).await;
            assert_eq!(bytes(1).await, hours * (4 * 1_024 + 100), "with its outbox");
            assert_eq!(bytes(7).await, hours * 100);
            assert_eq!(bytes(1_500).await, hours * 2 * 1_024);
            assert_eq!(database.number(rows).await, 2_500 - 3, "not 8, its outbox, the canary");
        }
        drain(&nodes[1]).await;
        assert_eq!(bytes(7).await, 2 * 100, "all of this hour are added");
        database.execute("update usage_hour set hour = now() - interval '2 hours'").await;
        drain(&nodes[1]).await;
        assert_eq!(bytes(7).await, 3 * 100, "the present hour");
    });
}

/// The first day of a month whose days are kept.
const LAST_MONTH: &str =
    "(date_trunc('month', now() at time zone 'UTC') - interval '1 month')::date";

async fn last_month(database: &Database) -> String {
    database.text(&format!("select to_char({LAST_MONTH}, 'YYYY-MM')")).await
}

#[test]
fn old_days_become_months_and_the_sum_stays() {
    run_alone(async |t| {
        let fill = format!(
            "insert into usage_days (project_id, day, enqueued, claimed, succeeded, dead_lettered,
                                     requests, poll_ms, log_bytes, byte_hours)
             select id, day, 1, 2, 3, 4, 5, 6000, 7, 8
             from projects, unnest(array[{LAST_MONTH}, {LAST_MONTH} + 20]) day
             where slug = 'main';
             insert into usage_months (project_id, month, enqueued)
             select id, {LAST_MONTH}, 10 from projects where slug = 'main'"
        );
        t.database.execute(&fill).await;
        let path = format!("/v1/usage?month={}", last_month(&t.database).await);
        let month = async || t.get(&path).await.is(200);
        let before = month().await;
        assert_eq!(amounts(&before), [12, 4, 6, 8, 10, 12, 14, 16]);
        assert_eq!(before["days"].as_array().expect("days").len(), 2);
        let mut conn = t.database.connect().await;
        let keep = format!("select (now() at time zone 'UTC')::date - {LAST_MONTH} - 20");
        let keep = sqlx::query_scalar(sqlx::AssertSqlSafe(keep));
        let keep: i32 = keep.fetch_one(&mut conn).await.expect("days");
        assert_eq!(fold_days(&mut conn, keep).await.expect("it runs"), 1);
        assert_eq!(month().await["days"].as_array().expect("days").len(), 1, "the other is kept");
        assert_eq!(fold_days(&mut conn, keep - 1).await.expect("it runs"), 1);
        let after = month().await;
        assert_eq!((amounts(&after), &after["days"]), (amounts(&before), &json!([])));
    });
}

#[test]
fn operators_get_a_table_of_all_projects_and_days() {
    run_alone(async |t| {
        let fill = format!(
            "insert into projects (public_id, slug, name, plan, mode, deleted_at, purged_at)
             values (gen_random_uuid(), 'gone', 'Gone', 'a \"large\", old plan', 'live', now(),
                     now());
             insert into usage_days (project_id, day, requests, poll_ms, byte_hours)
             select id, day, 5, 61999, 1 << 20
             from projects, unnest(array[{LAST_MONTH} - 1, {LAST_MONTH}, {LAST_MONTH} + 20,
                                         ({LAST_MONTH} + interval '1 month')::date]) day
             where slug in ('main', 'gone');
             insert into usage_months (project_id, month, requests)
             select id, {LAST_MONTH}, 7 from projects where slug = 'main'"
        );
        t.database.execute(&fill).await;
        let month = last_month(&t.database).await;
        let table = printed(t, &["usage", "--month", &month]);
        let lines: Vec<_> = table.lines().collect();
        let columns = "day,project,slug,plan,is_deleted,jobs_enqueued,attempts,jobs_succeeded,\
                       jobs_dead_lettered,requests,poll_seconds,log_bytes,stored_byte_hours";
        assert_eq!((lines.len(), lines[0]), (6, columns), "{table}");
        let rest = format!(",{},main,unlimited,false,0,0,0,0,7,0,0,0", t.id);
        assert_eq!(lines[1], rest, "what days no more show");
        let own = format!("{month}-01,{},main,unlimited,false,0,0,0,0,5,61,0,1048576", t.id);
        assert_eq!(lines[2], own);
        let gone = "gone,\"a \"\"large\"\", old plan\",true,0,0,0,0,5,61,0,1048576";
        assert!(
            lines[5].starts_with(&format!("{month}-21,proj_")) && lines[5].ends_with(gone),
            "{table}"
        );
        let present = format!("select ({LAST_MONTH} + interval '1 month')::date::text");
        let present = t.database.text(&present).await;
        let table = printed(t, &["usage"]);
        assert!(table.lines().skip(1).all(|it| it[..7] == present[..7]), "{table}");
        assert!(table.contains(&format!("{present},{},main,", t.id)), "{table}");
        let refused = operate(t, &["usage", "--month", "2024-2"]);
        let text = String::from_utf8(refused.stderr).expect("text");
        assert!(refused.status.code() == Some(2) && text.contains("such as 2026-11"), "{text}");
    });
}

#[test]
fn deliveries_and_the_canary_use_nothing() {
    limited(async {
        let database = fresh_database().await;
        let fill = "
            insert into projects (id, public_id, slug, name, plan, mode, kind, owner_project_id)
            overriding system value
            values (101, gen_random_uuid(), 'one', 'One', 'free', 'live', 'user', null),
                   (102, gen_random_uuid(), '.outbox', 'O', 'unlimited', 'live', 'outbox', 101),
                   (103, gen_random_uuid(), '.canary', 'C', 'unlimited', 'live', 'canary', null)";
        database.execute(fill).await;
        let counted =
            [101, 102, 103].map(|id| (ProjectId(id), Used { enqueued: 5, ..Used::default() }));
        add(&mut database.connect().await, &counted).await.expect("it runs");
        let sum = "select sum(enqueued)::bigint from usage_days";
        assert_eq!(database.number(sum).await, 5);
    });
}
