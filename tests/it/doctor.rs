//! `fencepost doctor`, and the commands of the runbooks, as the roles that the docs prescribe.

use std::{collections::BTreeMap, fs, process::Command};

use crate::harness::{Process, eventually, fresh_database, limited, logins, run_alone, scratch};
use fencepost::dev::Ready;
use fencepost_store::{connection::roles::Role, sweep::doctor};
use serde_json::json;
use sqlx::{ConnectOptions, Connection, Executor, PgConnection, Row, postgres::PgConnectOptions};

/// Runs a command of the operator, and returns whether it succeeded, and what it printed.
fn operate(args: &[&str]) -> (bool, String) {
    let run = Command::new(env!("CARGO_BIN_EXE_fencepost")).args(args).env_clear().output();
    let run = run.expect("it runs");
    let text = [run.stdout, run.stderr].concat();
    (run.status.success(), String::from_utf8(text).expect("text"))
}

async fn pid(conn: &mut PgConnection) -> i32 {
    conn.fetch_one(sqlx::raw_sql("select pg_backend_pid()")).await.expect("a number").get(0)
}

#[test]
fn doctor_names_what_is_wrong_and_the_command_that_ends_it() {
    run_alone(async |t| {
        let url = t.database.url.as_str();
        let look = || operate(&["doctor", "--database-url", url]);
        t.database.until("select count(*) from nodes", 1).await;
        // The tests' PostgreSQL vacuums nothing by itself.
        let autovacuum = "autovacuum is off. Next: alter system set autovacuum = on";
        let version = format!("1 of version {}", env!("CARGO_PKG_VERSION"));
        let (is_well, text) = look();
        assert!(!is_well && text.matches("WRONG").count() == 1, "{text}");
        for part in [autovacuum, "no due work is late", "no commit waits for one", &version] {
            assert!(text.contains(part), "{part}: {text}");
        }
        for _ in 0..2 {
            t.enqueue(json!({})).await;
        }
        // It fails, and stays behind.
        let mut conn = t.database.connect().await;
        let build = "create unique index concurrently of_someone on jobs (queue)";
        conn.execute(sqlx::raw_sql(build)).await.expect_err("two jobs have one queue");
        let (is_well, text) = look();
        let next = "of_someone was not built to its end. Next: reindex index concurrently";
        assert!(!is_well && text.contains(next), "{text}");
        // It is not one of the migrations' own: someone may be building it.
        let (is_done, text) = operate(&["migrate", "--database-url", url]);
        assert!(is_done, "{text}");
        let left = "select count(*) from pg_class where relname = 'of_someone'";
        assert_eq!(t.database.number(left).await, 1);
        let dead = operate(&["doctor", "--database-url", "postgres://none@127.0.0.1:1/none"]);
        assert!(!dead.0 && dead.1.contains("does not answer"), "{}", dead.1);
    });
}

#[test]
fn doctor_sees_snapshots_and_locks_and_says_what_is_hidden() {
    run_alone(async |t| {
        let (mut holder, mut waiter) = (t.database.connect().await, t.database.connect().await);
        let holds = pid(&mut holder).await;
        let mut tx = holder.begin().await.expect("it begins");
        let lock = "select pg_advisory_xact_lock(1), count(*) from jobs";
        tx.execute("set transaction isolation level repeatable read").await.expect("it is set");
        tx.execute(lock).await.expect("it is locked");
        let waits = tokio::spawn(async move { waiter.execute(lock).await.map(|_| ()) });
        let mut conn = t.database.connect().await;
        let blocker = eventually("a session that waits", async || {
            let mut conn = t.database.connect().await;
            let found = doctor::blockers(&mut conn, 0).await.expect("it runs");
            found.into_iter().find(|it| it.session.pid == holds)
        })
        .await;
        assert_eq!(blocker.waiting, 1);
        let old = doctor::old_snapshots(&mut conn, 0).await.expect("it runs");
        assert!(old.iter().any(|it| it.pid == holds), "{old:?}");
        assert_eq!(doctor::hidden_sessions(&mut conn).await.expect("it runs"), 0);
        let options: PgConnectOptions = t.database.url.parse().expect("a URL");
        let mut role = logins().log_in(&options, Role::Hot).connect().await.expect("a connection");
        assert!(doctor::hidden_sessions(&mut role).await.expect("it runs") > 0);
        tx.rollback().await.expect("it ends");
        waits.await.expect("no panic").expect("it is locked");
        let standbys = doctor::standbys(&mut role).await.expect("it runs");
        assert_eq!(standbys.synchronous, None, "it does not see them");
        let standbys = doctor::standbys(&mut conn).await.expect("it runs");
        assert_eq!((standbys.is_awaited, standbys.synchronous), (false, Some(0)));
    });
}

/// Blocks of commands in the runbooks that consist of `psql` alone, by their page.
fn blocks() -> BTreeMap<String, Vec<String>> {
    let mut blocks: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for entry in fs::read_dir("docs/runbooks").expect("a folder") {
        let path = entry.expect("an entry").path();
        let text = fs::read_to_string(&path).expect("a page");
        for block in text.split("```sh\n").skip(1).filter_map(|it| it.split("```").next()) {
            if block.starts_with("psql") {
                let page = path.file_name().expect("a name").to_string_lossy().into_owned();
                blocks.entry(page).or_default().push(block.to_owned());
            }
        }
    }
    blocks
}

#[test]
fn doctor_sees_slots_and_late_work_but_not_that_of_suspended_projects() {
    limited(async {
        let database = fresh_database().await;
        let mut conn = database.connect().await;
        let slot = format!("doctor_{}", std::process::id());
        database.execute(&format!("select pg_create_physical_replication_slot('{slot}')")).await;
        let slots = doctor::slots(&mut conn).await.expect("it runs");
        let found = slots.iter().find(|it| it.name == slot).expect("the slot");
        assert!(found.is_slot && !found.is_active);
        database.execute(&format!("select pg_drop_replication_slot('{slot}')")).await;
        let rows = "
            insert into projects (public_id, slug, name, plan, mode, suspended_at)
            values (gen_random_uuid(), 'a', 'a', 'free', 'live', null),
                   (gen_random_uuid(), 'b', 'b', 'free', 'live', now());
            insert into outbound_events (project_id, type, job_id, at)
            select id, 'job.succeeded', gen_random_uuid(), now() - interval '1 hour'
            from projects where slug = 'b';
            insert into jobs (project_id, id, queue, job_type, state, rank, run_at, max_attempts,
                              timeout_seconds)
            select id, gen_random_uuid(), 'q', 't', 'scheduled', 0, now() - interval '2 hours', 3, 60
            from projects where slug = 'a'";
        database.execute(rows).await;
        let late = doctor::late_loops(&mut conn).await.expect("it runs");
        let names: Vec<_> = late.iter().map(|it| &*it.0).collect();
        assert_eq!(names, ["promote"], "{late:?}");
        assert!((late[0].1 - 7_200.0).abs() < 60.0, "{late:?}");
    });
}

#[test]
fn each_runbooks_commands_work_for_the_logins_that_they_name() {
    limited(async {
        let dir = scratch("runbooks-dev");
        let mut command = Command::new(env!("CARGO_BIN_EXE_fencepost"));
        command.args(["dev", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]);
        let _dev = Process::start(command.arg("--data-dir").arg(&dir));
        let ready =
            eventually("the node", async || Ready::of_running(Some(dir.clone())).ok()).await;
        let admin: PgConnectOptions = ready.database_url.parse().expect("a URL");
        let mut conn = admin.connect().await.expect("a connection");
        conn.execute("create role an_owner login createrole").await.expect("it is made");
        conn.execute("create database owned owner an_owner").await.expect("it is made");
        let socket = &ready.database_url;
        let owners_url =
            socket.replace("fencepost@localhost/fencepost", "an_owner@localhost/owned");
        let admin_url = socket.replace("localhost/fencepost", "localhost/owned");
        assert!(owners_url != *socket && admin_url != *socket, "{socket}");
        let roles = dir.join("roles");
        let roles = roles.to_str().expect("a path");
        let (is_done, text) =
            operate(&["migrate", "--database-url", &owners_url, "--database-roles", roles]);
        assert!(is_done, "{text}");
        // A session of a role, which the owner must see.
        let hot = admin.clone().username("fencepost_hot").database("owned");
        let mut hot = hot.connect().await.expect("a connection");
        let mut tx = hot.begin().await.expect("it begins");
        tx.execute("select count(*) from jobs").await.expect("it runs");
        let (_, text) = operate(&["doctor", "--database-url", &owners_url]);
        assert!(!text.contains("hidden"), "{text}");
        let blocks = blocks();
        for page in ["snapshot-held.md", "store-errors.md", "items-set-aside.md", "wal-held.md"] {
            assert!(blocks.contains_key(page), "{page} has commands");
        }
        for (page, block) in
            blocks.iter().flat_map(|(page, it)| it.iter().map(move |it| (page, it)))
        {
            let run = Command::new("sh")
                .args(["-ec", block])
                .env("OWNERS_URL", &owners_url)
                .env("ADMIN_URL", &admin_url)
                .output()
                .expect("it runs");
            let text = String::from_utf8_lossy(&[run.stdout, run.stderr].concat()).into_owned();
            let is_good = run.status.success() && !text.contains("insufficient privilege");
            assert!(is_good, "{page}: {block}\n{text}");
        }
    });
}
