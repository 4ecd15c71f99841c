//! The roles of ops/roles.sql: each may do what its work needs, and the console sees one project at
//! a time. (Every server of these tests runs with them.)

use crate::harness::{TestProject, TestServer, fresh_database, limited};
use serde_json::json;
use sqlx::{ConnectOptions, Executor, PgConnection, Row, postgres::PgConnectOptions};

async fn as_role(t: &TestProject, role: &str) -> PgConnection {
    let url = t.database.url.replace("//fencepost@", "//fencepost_node@");
    let options: PgConnectOptions = url.parse().expect("a URL");
    options.options([("role", role)]).connect().await.expect("a connection")
}

async fn count(conn: &mut PgConnection, sql: &'static str) -> i64 {
    conn.fetch_one(sqlx::raw_sql(sql)).await.expect("a count").get(0)
}

async fn is_refused(conn: &mut PgConnection, sql: &'static str) -> bool {
    let refused = conn.execute(sqlx::raw_sql(sql)).await.err();
    let code = refused.as_ref().and_then(|it| it.as_database_error()).and_then(|it| it.code());
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
        let mut console = as_role(&ours, "fencepost_console").await;
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
        let mut hot = as_role(&t, "fencepost_hot").await;
        let mut console = as_role(&t, "fencepost_console").await;
        let mut people = as_role(&t, "fencepost_people").await;
        let mut maint = as_role(&t, "fencepost_maint").await;
        for conn in [&mut hot, &mut console, &mut people, &mut maint] {
            assert!(is_refused(conn, "update audit_log set action = 'x'").await);
            assert!(is_refused(conn, "create table mine (id int)").await);
            assert!(is_refused(conn, "drop table jobs").await);
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
