//! Redis as people run it: with TLS, a user of few rights, Sentinels, a cluster.

use std::{
    collections::BTreeSet,
    fs,
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use fencepost_config::RedisPlace;
use fencepost_signals::redis_bus::{Bus, Heard, Topic};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::harness::{
    Stage, TestProject, TestServer, free_port, fresh_database, limited, scratch, until,
};

const START_TIMEOUT: Duration = Duration::from_secs(10);
const BUDGET: Duration = Duration::from_secs(2);

/// A node of a cluster also listens this far above its port.
const BUS_DISTANCE: u16 = 10_000;

/// A port for a node of a cluster. The other one may have been given to any connection.
fn free_port_pair() -> u16 {
    loop {
        let port = free_port();
        if TcpListener::bind(("127.0.0.1", port + BUS_DISTANCE)).is_ok() {
            return port;
        }
    }
}

/// A Redis server, or a Sentinel, on a port of its own.
struct Server {
    child: Child,
    port: u16,
    dir: PathBuf,
}

impl Server {
    fn start(name: &str, settings: &str, more: &[&str]) -> Self {
        let port = match settings.contains("cluster-enabled") {
            true => free_port_pair(),
            false => free_port(),
        };
        let dir = scratch(&format!("redis-{name}-{port}"));
        let file = dir.join("redis.conf");
        let all = format!("dir {}\nsave \"\"\nappendonly no\n{settings}\n", dir.display())
            .replace("{port}", &port.to_string());
        fs::write(&file, all).expect("a file");
        let child = Command::new("redis-server")
            .arg(&file)
            .args(more)
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts");
        let this = Self { child, port, dir };
        let deadline = Instant::now() + START_TIMEOUT;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < deadline, "{name} was not ready in time");
            std::thread::sleep(Duration::from_millis(10));
        }
        this
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    async fn ask(&self, command: &[&str]) -> redis::RedisResult<redis::Value> {
        let client = redis::Client::open(format!("redis://{}", self.address())).expect("a URL");
        let mut conn = client.get_multiplexed_async_connection().await?;
        let (name, args) = command.split_first().expect("a command");
        redis::cmd(name).arg(args).query_async(&mut conn).await
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Sends a message to itself over this Redis, and checks that it arrives.
async fn heard(place: RedisPlace) {
    let bus = Bus::new(Some(&place), Uuid::new_v4(), BUDGET).expect("a bus");
    let facts = bus.inspect().await.unwrap_or_else(|error| panic!("{error:#}"));
    assert!(facts.is_some_and(|it| it.version.starts_with(|it: char| it.is_ascii_digit())));
    fencepost_signals::limiter::Limiter::rehearse(&bus).await.expect("the counters work");
    let (stop, (reported, mut hears)) =
        (CancellationToken::new(), tokio::sync::mpsc::unbounded_channel());
    let (wants, wanted) = tokio::sync::watch::channel(BTreeSet::from([1]));
    let listening = bus.listen(stop.clone(), wanted, |heard| drop(reported.send(heard)));
    let talking = async {
        let mut until = async |wanted: Heard| {
            while hears.recv().await.expect("the subscription lasts") != wanted {}
        };
        until(Heard::Joined).await;
        assert!(bus.publish(Topic::Evict, "key").await);
        until(Heard::Evict("key".to_owned())).await;
        // One shard instead of another.
        wants.send_replace(BTreeSet::from([2]));
        until(Heard::Joined).await;
        for (topic, text) in [(Topic::Wake(1), "1"), (Topic::Wake(2), "2")] {
            assert!(bus.publish(topic, text).await);
        }
        assert_eq!(hears.recv().await, Some(Heard::Wake("2".to_owned())));
        stop.cancel();
    };
    tokio::join!(listening, talking);
}

/// A certificate authority, and what it has signed for 127.0.0.1.
fn certificates(dir: &std::path::Path) {
    let script = r#"
        set -e
        openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.pem
        openssl req -newkey rsa:2048 -nodes -subj /CN=redis -keyout redis.key -out redis.csr
        printf 'subjectAltName=IP:127.0.0.1\n' > names
        openssl x509 -req -in redis.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 \
            -extfile names -out redis.pem
    "#;
    let made = Command::new("sh").args(["-c", script]).current_dir(dir).output().expect("a shell");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

#[test]
fn tls_with_a_certificate_authority_of_ones_own() {
    limited(async {
        let dir = scratch("redis-tls");
        certificates(&dir);
        let place = dir.display();
        let settings = format!(
            "port 0\ntls-port {{port}}\ntls-auth-clients no\ntls-ca-cert-file {place}/ca.pem
             tls-cert-file {place}/redis.pem\ntls-key-file {place}/redis.key"
        );
        let server = Server::start("tls", &settings, &[]);
        let url = format!("rediss://{}", server.address());
        let ca = Some(fs::read(dir.join("ca.pem")).expect("a file"));
        let unknown = RedisPlace::from(url.clone());
        heard(RedisPlace { url: url.into(), ca }).await;
        let bus = Bus::new(Some(&unknown), Uuid::new_v4(), BUDGET).expect("a bus");
        assert!(bus.inspect().await.is_err(), "the system does not know this authority");
    });
}

/// The rights that docs/operations.md lists.
fn documented_user() -> String {
    let page = include_str!("../../docs/operations.md");
    let block = page.split("```text\n").find(|it| it.starts_with("user fencepost"));
    let block = block.and_then(|it| it.split("```").next()).expect("the rights");
    block.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn check_accepts_the_documented_redis_user_and_names_missing_rights() {
    limited(async {
        let user = documented_user().replace("PASSWORD", "secret");
        let settings = format!("port {{port}}\nuser default off\n{user}");
        let server = Server::start("acl", &settings, &[]);
        let url = format!("redis://fencepost:secret@{}", server.address());
        heard(RedisPlace::from(url)).await;
        for (missing, refused) in [("+publish", "messages"), ("+zadd", "counters")] {
            let settings =
                format!("port {{port}}\nuser default off\n{}", user.replace(missing, ""));
            let server = Server::start("acl", &settings, &[]);
            let url = format!("redis://fencepost:secret@{}", server.address());
            let checked = Command::new(env!("CARGO_BIN_EXE_fencepost"))
                .args(["check", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"])
                .env("FENCEPOST_REDIS_URL", url)
                .output()
                .expect("it runs");
            let reported = String::from_utf8_lossy(&checked.stdout).into_owned();
            let line = reported.lines().find(|it| it.contains("WRONG    redis"));
            assert!(line.is_some_and(|it| it.contains(refused)), "{missing}: {reported}");
        }
    });
}

#[test]
fn a_cluster() {
    limited(async {
        let settings = "port {port}\ncluster-enabled yes\ncluster-node-timeout 2000";
        let nodes: Vec<_> = (0..3).map(|_| Server::start("cluster", settings, &[])).collect();
        let addresses: Vec<_> = nodes.iter().map(Server::address).collect();
        let made = Command::new("redis-cli")
            .args(["--cluster", "create", "--cluster-yes"])
            .args(&addresses)
            .output()
            .expect("redis-cli runs");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stdout));
        let place = RedisPlace::from(format!("redis+cluster://{}", addresses.join(",")));
        heard(place.clone()).await;
        let stage = Stage { redis: Some(place), ..Stage::default() };
        let server = TestServer::start_as(fresh_database().await, stage).await;
        let t = server.project_with("main", "unlimited", json!({"produce_per_minute": 2})).await;
        let enqueue = async || t.post("/v1/jobs", json!({"job_type": "t"})).await.status.as_u16();
        assert_eq!([enqueue().await, enqueue().await, enqueue().await], [201, 201, 429]);
        server.stop().await;
    });
}

/// A master, its replica, and three Sentinels that promote it.
struct Watched {
    master: Option<Server>,
    replica: Server,
    sentinels: Vec<Server>,
}

impl Watched {
    async fn start() -> Self {
        let master = Server::start("master", "port {port}", &[]);
        let replica = format!("port {{port}}\nreplicaof 127.0.0.1 {}", master.port);
        let replica = Server::start("replica", &replica, &[]);
        let settings = format!(
            "port {{port}}\nsentinel monitor jobs 127.0.0.1 {} 2
             sentinel down-after-milliseconds jobs 1000\nsentinel failover-timeout jobs 3000",
            master.port
        );
        let sentinel = |_| Server::start("sentinel", &settings, &["--sentinel"]);
        let sentinels: Vec<_> = (0..3).map(sentinel).collect();
        let this = Self { master: Some(master), replica, sentinels };
        // They find the replica and each other.
        let knows = async |sentinel: &Server| {
            let replicas = sentinel.ask(&["SENTINEL", "REPLICAS", "jobs"]).await;
            let others = sentinel.ask(&["SENTINEL", "SENTINELS", "jobs"]).await;
            let count = |it: redis::RedisResult<redis::Value>| match it {
                Ok(redis::Value::Array(all)) => all.len(),
                _ => 0,
            };
            (count(replicas), count(others)) == (1, 2)
        };
        for sentinel in &this.sentinels {
            until("the sentinel to know the replica", async || knows(sentinel).await).await;
        }
        this
    }

    fn url(&self) -> String {
        let hosts: Vec<_> = self.sentinels.iter().map(Server::address).collect();
        format!("redis+sentinel://{}/jobs", hosts.join(","))
    }
}

#[test]
fn a_replica_that_is_promoted_takes_over_without_a_failed_call() {
    const LIMIT: u32 = 60;
    const SOON: Duration = Duration::from_secs(5);
    limited(async {
        let mut watched = Watched::start().await;
        let place = RedisPlace::from(watched.url());
        heard(place.clone()).await;
        let stage = Stage {
            redis: Some(place),
            redis_budget: fencepost_signals::redis_bus::DEFAULT_BUDGET,
            ..Stage::default()
        };
        let database = fresh_database().await;
        let one = TestServer::start_as(database.clone(), stage.clone()).await;
        let other = TestServer::start_as(database, stage).await;
        let t = one.project_with("main", "unlimited", json!({"produce_per_minute": LIMIT})).await;
        let failover = async {
            drop(watched.master.take());
            until("the replica to be promoted", async || {
                let role = watched.replica.ask(&["ROLE"]).await;
                matches!(role, Ok(redis::Value::Array(it)) if
                    it.first() == Some(&redis::Value::BulkString(b"master".to_vec())))
            })
            .await;
            Instant::now()
        };
        let started = Instant::now();
        let mut let_in = 0;
        let mut calling = async |t: &TestProject| {
            let status = t.post("/v1/jobs", json!({"job_type": "t"})).await.status.as_u16();
            assert!([201, 429].contains(&status), "{status}");
            let_in += u32::from(status == 201);
        };
        let mut failover = std::pin::pin!(failover);
        let promoted = loop {
            tokio::select! {
                promoted = &mut failover => break promoted,
                () = calling(&t) => (),
            }
        };
        // The limit is counted by the new master, soon and to the end.
        let counted = async || match watched.replica.ask(&["KEYS", "*limit:*"]).await {
            Ok(redis::Value::Array(keys)) => !keys.is_empty(),
            _ => false,
        };
        while !counted().await {
            assert!(promoted.elapsed() < SOON, "it counts {:?} later", promoted.elapsed());
            calling(&t).await;
        }
        while promoted.elapsed() < SOON {
            calling(&t).await;
        }
        let back = started.elapsed().as_secs() as u32 * LIMIT / 60 + 1;
        // What the old master counted, what the new one does, and the node's share without either.
        assert!(let_in <= 2 * LIMIT + LIMIT / 2 + back, "{let_in}");
        // Messages go over it, too.
        let quiet = one.project_with("quiet", "unlimited", json!({})).await;
        let there = quiet.through(&other.url);
        let parked = tokio::spawn(async move { there.wait_and_lease("w").await });
        let id = quiet.enqueue(json!({})).await;
        let since = Instant::now();
        assert_eq!(parked.await.expect("a job")["id"], json!(id));
        assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
        one.stop().await;
        other.stop().await;
    });
}
