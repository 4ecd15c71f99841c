//! The roles of ops/roles.sql: each may do what its work needs, and the console sees one project at
//! a time. (Every server of these tests runs with them.)

use std::{path::Path, process::Command};

use crate::harness::{
    LoneProject, Process, TestServer, eventually, fresh_database, limited, logins, scratch, until,
};
use fencepost::dev::Ready;
use fencepost_store::connection::roles::Role;
use serde_json::json;
use sqlx::{
    ConnectOptions, Executor, PgConnection, Row, error::DatabaseError, postgres::PgConnectOptions,
};

async fn as_role(t: &LoneProject, role: Role) -> PgConnection {
    let options: PgConnectOptions = t.database.url.parse().expect("a URL");
    logins().log_in(&options, role).connect().await.expect("a connection")
}

async fn count(conn: &mut PgConnection, sql: &'static str) -> i64 {
    conn.fetch_one(sqlx::raw_sql(sql)).await.expect("a count").get(0)
}

async fn is_refused(conn: &mut PgConnection, sql: &'static str) -> bool {
    let refused = conn.execute(sqlx::raw_sql(sql)).await.err();
    let code = refused.as_ref().and_then(|it| it.as_database_error()).and_then(DatabaseError::code);
    code.is_some_and(|it| it == "42501")
}

#[test]
fn the_console_sees_the_rows_of_one_project_and_without_one_none() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let (ours, theirs) = (server.project("ours").await, server.project("theirs").await);
        for t in [&ours, &ours, &theirs] {
            t.enqueue(json!({})).await;
        }
        let mut console = as_role(&ours, Role::Console).await;
        let jobs = "select count(*) from jobs";
        assert_eq!(count(&mut console, jobs).await, 0);
        assert_eq!(count(&mut console, "select count(*) from projects").await, 0);
        let mine = "select set_config('app.project_id', min(project_id)::text, false) from jobs";
        let id: String = {
            let mut owner = ours.database.connect().await;
            owner.fetch_one(sqlx::raw_sql(mine)).await.expect("an id").get(0)
        };
        let set = sqlx::query("select set_config('app.project_id', $1, false)").bind(id);
        set.execute(&mut console).await.expect("it is set");
        assert_eq!(count(&mut console, jobs).await, 2);
        assert_eq!(count(&mut console, "select count(*) from api_keys").await, 1);
        let moved = "update jobs set project_id = project_id + 1";
        assert!(is_refused(&mut console, moved).await, "nothing is handed to another project");
        server.stop().await;
    });
}

#[test]
fn no_role_may_do_more_than_its_work_needs() {
    limited(async {
        let server = TestServer::start(fresh_database().await).await;
        let t = server.project("main").await;
        let mut hot = as_role(&t, Role::Hot).await;
        let mut console = as_role(&t, Role::Console).await;
        let mut people = as_role(&t, Role::People).await;
        let mut maint = as_role(&t, Role::Maint).await;
        for conn in [&mut hot, &mut console, &mut people, &mut maint] {
            assert!(is_refused(conn, "update audit_log set action = 'x'").await);
            assert!(is_refused(conn, "create table mine (id int)").await);
            assert!(is_refused(conn, "drop table jobs").await);
            assert!(is_refused(conn, "set role fencepost").await);
            assert!(is_refused(conn, "set role fencepost_hot; set role fencepost_maint").await);
        }
        for conn in [&mut hot, &mut console] {
            assert!(is_refused(conn, "select password_hash from accounts").await);
            assert!(is_refused(conn, "select * from signing_keys").await);
            assert!(is_refused(conn, "select * from refresh_tokens").await);
        }
        assert!(is_refused(&mut hot, "select * from api_keys").await);
        assert!(is_refused(&mut console, "delete from audit_log").await);
        assert!(is_refused(&mut people, "select * from jobs").await);
        server.stop().await;
    });
}

/// Runs a command of the operator, and returns whether it succeeded, and what it printed.
fn operate(args: &[&str]) -> (bool, String) {
    let run = Command::new(env!("CARGO_BIN_EXE_fencepost")).args(args).env_clear().output();
    let run = run.expect("it runs");
    let text = [run.stdout, run.stderr].concat();
    (run.status.success(), String::from_utf8(text).expect("text"))
}

/// From its next reload on, a database asks the roles for their passwords.
fn ask_for_passwords(data_dir: &Path) {
    let rules = data_dir.join("postgres/pg_hba.conf");
    let ask = "local all fencepost_hot,fencepost_console,fencepost_people,fencepost_maint \
               scram-sha-256\n";
    let reported = std::fs::read_to_string(&rules).expect("the rules");
    std::fs::write(&rules, format!("{ask}{reported}")).expect("they are written");
}

#[test]
fn each_role_logs_in_with_its_password_and_a_refused_one_is_named() {
    limited(async {
        let dir = scratch("roles-dev");
        let data_dir = dir.to_str().expect("a path");
        let mut command = Command::new(env!("CARGO_BIN_EXE_fencepost"));
        command.args(["dev", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]);
        let _dev = Process::start(command.args(["--data-dir", data_dir]));
        let ready =
            eventually("the node", async || Ready::of_running(Some(dir.clone())).ok()).await;
        let readyz = async || {
            let answer =
                crate::harness::client().get(format!("{}/readyz", ready.url)).send().await.ok()?;
            let status = answer.status().as_u16();
            Some((status, answer.text().await.ok()?))
        };
        let answers = async |wanted: u16| {
            eventually(format!("{wanted} from /readyz"), async || {
                readyz().await.filter(|it| it.0 == wanted)
            })
            .await
        };
        answers(200).await;
        ask_for_passwords(&dir);
        let options: PgConnectOptions = ready.database_url.parse().expect("a URL");
        let mut owner = options.connect().await.expect("a connection");
        let mut report = async |sql: &'static str| {
            owner.execute(sqlx::raw_sql(sql)).await.expect("it runs");
        };
        report("select pg_reload_conf()").await;
        let roles = dir.join("roles");
        let roles = roles.to_str().expect("a path");
        let check = || {
            let url = ready.database_url.as_str();
            operate(&[
                "check",
                "--listen",
                "127.0.0.1:0",
                "--metrics-listen",
                "127.0.0.1:0",
                "--database-url",
                url,
                "--database-roles",
                roles,
            ])
        };
        until("each role to log in", async || check().1.contains("each can log in")).await;
        let renew = "select pg_terminate_backend(pid) from pg_stat_activity
                     where usename = 'fencepost_maint'";
        report("alter role fencepost_maint password 'another-password-now'").await;
        report(renew).await;
        let (_, refused) = answers(503).await;
        assert!(refused.contains("the login of fencepost_maint"), "{refused}");
        let (is_good, reported) = check();
        assert!(!is_good && reported.contains("fencepost_maint cannot log in"), "{reported}");
        let migrate = ["migrate", "--database-url", &ready.database_url];
        let (is_done, reported) = operate(&[&migrate[..], &["--database-roles", roles]].concat());
        assert!(is_done, "{reported}");
        answers(200).await;
        assert!(check().1.contains("each can log in"));
        std::fs::remove_file(dir.join("roles/hot")).expect("it goes");
        let (is_done, reported) = operate(&[&migrate[..], &["--database-roles", roles]].concat());
        assert!(!is_done && reported.contains("roles/hot"), "{reported}");
    });
}
