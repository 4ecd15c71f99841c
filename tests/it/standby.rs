//! A standby that lacks the last commits takes over. What it lacks is lost, and nothing else: it is
//! done again, and no ack counts for a lease that it does not know.

use std::{fs, os::unix::fs::symlink, path::PathBuf};

use crate::harness::{
    Database, LoneProject, Proxy, Reply, Stage, TestProject, TestServer, eventually, home, limited,
};
use fencepost::dev::cluster::{self, Cluster, Durability};
use fencepost_store::connection::migrate;
use reqwest::Method;
use serde_json::{Value, json};

/// A primary whose commits do not wait for its standby.
struct Pair {
    dir: PathBuf,
    /// Leads to the socket of the server that is in use.
    socket: PathBuf,
    /// None once it is gone.
    primary: Option<Cluster>,
    standby: Option<Cluster>,
}

impl Pair {
    fn start() -> Self {
        let pid = std::process::id();
        let dir = home().join(format!("standby-{pid}"));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("a folder");
        let socket = |name: &str| cluster::socket_dir(pid).with_extension(name);
        let start = |name: &str| {
            Cluster::start_at(&dir.join(name), Durability::Fast, socket(name)).expect("PostgreSQL")
        };
        let primary = start("primary");
        primary.copy_to(&dir.join("standby"), "standby").expect("a copy");
        let standby = start("standby");
        let in_use = socket("in-use");
        let _ = fs::remove_file(&in_use);
        symlink(socket("primary"), &in_use).expect("a link");
        Self { dir, socket: in_use, primary: Some(primary), standby: Some(standby) }
    }

    /// The database of the server that is in use.
    fn database(&self) -> Database {
        let url = self.standby().url;
        let (before, _) = url.split_once("?host=").expect("a socket's folder");
        Database { url: format!("{before}?host={}", self.socket.display()) }
    }

    fn standby(&self) -> Database {
        let standby = self.standby.as_ref().expect("a standby");
        Database { url: standby.database_url("postgres") }
    }

    /// Waits until the standby has all commits, and lets it get no more.
    async fn cut_off(&self) {
        let last = self.database().text("select pg_current_wal_lsn()::text").await;
        let standby = self.standby();
        let has_all = format!("select (pg_last_wal_replay_lsn() >= '{last}')::int::bigint");
        standby.until(&has_all, 1).await;
        standby.execute("alter system set primary_conninfo = ''").await;
        standby.execute("select pg_reload_conf()").await;
        standby.until("select count(*) from pg_stat_wal_receiver", 0).await;
    }

    /// Lets the standby take over.
    async fn fail_over(&mut self, proxy: &Proxy) {
        proxy.cut(true);
        self.standby().execute("select pg_promote()").await;
        self.standby().until("select pg_is_in_recovery()::int::bigint", 0).await;
        // In one step: the proxy connects all the time.
        let next = self.socket.with_extension("next");
        symlink(self.socket.with_extension("standby"), &next).expect("a link");
        fs::rename(&next, &self.socket).expect("the link is replaced");
        // A connection that came before still leads to the old primary.
        drop(self.primary.take());
        proxy.cut(false);
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // A running server would write into its folder again.
        drop((self.primary.take(), self.standby.take()));
        let _ = fs::remove_file(&self.socket);
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Calls until the node has its new database.
async fn patiently(call: impl AsyncFn() -> Reply) -> Reply {
    eventually("an answer other than 503", async || {
        let reply = call().await;
        (reply.status != 503).then_some(reply)
    })
    .await
}

/// Sends a job with a key, as a producer that sends it again when it is not sure.
async fn send(t: &TestProject, key: &str) -> Reply {
    let request = t.request(Method::POST, "/v1/jobs").header("idempotency-key", key);
    let request = request.json(&json!({"job_type": "t", "queue": "sent"}));
    Reply::of(request.send().await.expect("an answer")).await
}

#[test]
fn what_a_standby_database_lacks_is_done_again_and_no_ack_counts_for_another_lease() {
    limited(async {
        let mut pair = Pair::start();
        migrate::migrate(&pair.database().url).await.expect("the migrations run");
        let proxy = Proxy::start(&pair.database()).await;
        let stage = Stage { roles: false, ..Stage::default() };
        let server = TestServer::start_as(proxy.database(), stage).await;
        let t = LoneProject::at(&server.url, &pair.database(), "main").await;
        let kept = t.enqueue(json!({})).await;
        let kept_lease = t.lease("early").await;
        let waiting = t.enqueue(json!({})).await;
        pair.cut_off().await;
        t.ack(&kept_lease, "early", "succeeded").await.is(200);
        let lost_lease = t.lease("first").await;
        assert_eq!((&lost_lease["id"], &lost_lease["attempt"]), (&json!(waiting), &json!(1)));
        let lost = send(&t, "a-key").await.is(201);

        pair.fail_over(&proxy).await;
        // An ack that was lost is sent again, as after a lost answer.
        let get = async |id: &Value| patiently(async || t.get(&path(id)).await).await;
        let ack = async |lease: &Value, worker: &str| {
            patiently(async || t.ack(lease, worker, "succeeded").await).await
        };
        assert_eq!(get(&json!(kept)).await.is(200)["state"], "processing");
        ack(&kept_lease, "early").await.is(200);
        assert_eq!(get(&json!(kept)).await.is(200)["state"], "succeeded");
        // A lost lease is given again with the same attempt, and is another one.
        let poll = json!({"worker_id": "second", "queues": ["default"], "wait_seconds": 0});
        let again = patiently(async || t.post("/v1/workers/poll", poll.clone()).await).await;
        let again = again.is(200)["jobs"][0].clone();
        assert_eq!((&again["id"], &again["attempt"]), (&json!(waiting), &json!(1)));
        assert_ne!(again["lease_id"], lost_lease["lease_id"]);
        for (worker, code) in [("first", "worker_mismatch"), ("second", "stale_lease")] {
            ack(&lost_lease, worker).await.is_error(409, code);
            let beat = patiently(async || t.heartbeat(&lost_lease, worker).await).await;
            beat.is_error(409, code);
        }
        ack(&again, "second").await.is(200);
        // A lost job is gone as a whole: its key makes it again.
        get(&lost["id"]).await.is_error(404, "job_not_found");
        let sent_again = patiently(async || send(&t, "a-key").await).await.is(201);
        assert_eq!(get(&sent_again["id"]).await.is(200)["state"], "pending");
        server.stop().await;
    });
}

fn path(job: &Value) -> String {
    format!("/v1/jobs/{}", job.as_str().expect("an id"))
}
