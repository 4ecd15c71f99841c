//! PostgreSQL as Patroni runs it: three members that agree over etcd who leads, and HAProxy, which
//! leads connections there. Settings are Patroni's own, but for synchronous replication.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use fencepost::dev::cluster;
use serde_json::{Value, json};
use sqlx::{ConnectOptions, PgConnection, postgres::PgConnectOptions};
use tokio::time::{sleep, timeout};

use crate::{
    as_postgres,
    pair::{kill_processes_of, postmaster, signal_processes_of},
    signal,
};

/// Members of the cluster.
const MEMBERS: usize = 3;
/// Ports that it needs: two of etcd, two of each member, and HAProxy's.
pub const PORTS: u16 = 3 + 2 * MEMBERS as u16;
/// Longest wait for a leader, a synchronous standby, and three members that run.
const WHOLE_TIMEOUT: Duration = Duration::from_secs(180);
const LOOK_PERIOD: Duration = Duration::from_millis(200);
const CALL_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest switchover: Patroni answers once it is done.
const SWITCH_TIMEOUT: Duration = Duration::from_secs(60);

/// See the module's comment.
pub struct Patroni {
    dir: PathBuf,
    first_port: u16,
    etcd: Option<Child>,
    members: Vec<Option<Child>>,
    haproxy: Child,
    client: reqwest::Client,
}

impl Patroni {
    /// Starts all of it in a folder. To be called from the main thread.
    ///
    /// # Errors
    /// When something is not installed, or there is no leader in time.
    pub async fn start(dir: &Path, first_port: u16) -> anyhow::Result<Self> {
        let dir = dir.join("patroni");
        fs::create_dir_all(&dir)?;
        // Patroni runs as PostgreSQL does, and makes folders here.
        if cluster::is_root()? {
            std::os::unix::fs::chown(&dir, Some(postgres_id("-u")?), Some(postgres_id("-g")?))?;
        }
        let haproxy = dir.join("haproxy.cfg");
        fs::write(&haproxy, haproxy_config(first_port))?;
        let haproxy = start(&dir, "haproxy", &["-f".as_ref(), haproxy.as_ref()])?;
        let client = reqwest::Client::new();
        let members = (0..MEMBERS).map(|_| None).collect();
        let mut patroni = Self { dir, first_port, etcd: None, members, haproxy, client };
        patroni.start_etcd()?;
        for member in 0..MEMBERS {
            patroni.start_member(member)?;
        }
        patroni.until_whole().await?;
        Ok(patroni)
    }

    /// The URL of the leader, behind HAProxy.
    #[must_use]
    pub fn database_url(&self) -> String {
        let port = haproxy_port(self.first_port);
        format!("postgres://fencepost@127.0.0.1:{port}/postgres")
    }

    /// A connection to the leader.
    ///
    /// # Errors
    /// When there is none.
    pub async fn connect(&self) -> anyhow::Result<PgConnection> {
        let options: PgConnectOptions = self.database_url().parse()?;
        Ok(timeout(CALL_TIMEOUT, options.connect()).await??)
    }

    /// Starts etcd with what it has stored.
    ///
    /// # Errors
    /// When it is not installed.
    pub fn start_etcd(&mut self) -> anyhow::Result<()> {
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let (clients, peers) = (url(self.first_port), url(self.first_port + 1));
        let data = self.dir.join("etcd").display().to_string();
        let args = [
            ["--name", "etcd"],
            ["--data-dir", &data],
            ["--listen-client-urls", &clients],
            ["--advertise-client-urls", &clients],
            ["--listen-peer-urls", &peers],
            ["--initial-advertise-peer-urls", &peers],
            ["--initial-cluster", &format!("etcd={peers}")],
        ];
        let args: Vec<&Path> = args.as_flattened().iter().map(Path::new).collect();
        self.etcd = Some(start(&self.dir, "etcd", &args)?);
        Ok(())
    }

    /// Kills etcd: no member can become leader, or stay it for long.
    pub fn kill_etcd(&mut self) {
        if let Some(mut etcd) = self.etcd.take() {
            let _ = etcd.kill();
            let _ = etcd.wait();
        }
    }

    /// Starts a member that does not run.
    ///
    /// # Errors
    /// When Patroni is not installed.
    pub fn start_member(&mut self, member: usize) -> anyhow::Result<()> {
        let config = self.dir.join(format!("member-{member}.json"));
        fs::write(&config, self.member_config(member)?.to_string())?;
        let started = start(&self.dir, "patroni", &[&config])?;
        self.members[member] = Some(started);
        Ok(())
    }

    /// Kills a member: Patroni, and PostgreSQL with all its sessions.
    pub fn kill_member(&mut self, member: usize) {
        if let Some(mut patroni) = self.members[member].take() {
            let _ = patroni.kill();
            let _ = patroni.wait();
        }
        if let Ok(postmaster) = postmaster(&self.data_dir(member)) {
            let _ = kill_processes_of(&postmaster);
        }
    }

    /// Freezes a member, or lets it continue.
    ///
    /// # Errors
    /// When its PostgreSQL does not run.
    pub fn freeze_member(&self, member: usize, is_frozen: bool) -> anyhow::Result<()> {
        let name = if is_frozen { "STOP" } else { "CONT" };
        if let Some(patroni) = &self.members[member] {
            signal(name, &[&patroni.id().to_string()]);
        }
        signal_processes_of(&postmaster(&self.data_dir(member))?, name)
    }

    /// Asks Patroni to let the synchronous standby lead, as before maintenance.
    ///
    /// # Errors
    /// When it refuses.
    pub async fn switch_over(&self) -> anyhow::Result<()> {
        let leader = self.leader().await.context("there is no leader")?;
        let url = format!("{}/switchover", self.url(leader));
        let body = json!({"leader": format!("member-{leader}")});
        let asked = self.client.post(url).json(&body).timeout(SWITCH_TIMEOUT).send().await?;
        let status = asked.status();
        ensure!(status.is_success(), "{status} {}", asked.text().await?);
        Ok(())
    }

    /// The member that leads.
    pub async fn leader(&self) -> Option<usize> {
        for member in 0..MEMBERS {
            let url = format!("{}/primary", self.url(member));
            let asked = self.client.get(url).timeout(CALL_TIMEOUT).send().await;
            if asked.is_ok_and(|it| it.status().is_success()) {
                return Some(member);
            }
        }
        None
    }

    /// Waits until there are a leader, a synchronous standby, and three members that run.
    ///
    /// # Errors
    /// When it is not so in time.
    pub async fn until_whole(&self) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            let roles = self.roles().await;
            let has = |role: &str| roles.iter().any(|it| it == role);
            if roles.len() == MEMBERS && has("leader") && has("sync_standby") {
                return Ok(());
            }
            let dir = self.dir.display();
            ensure!(began.elapsed() < WHOLE_TIMEOUT, "only {roles:?} run: see {dir}");
            sleep(LOOK_PERIOD).await;
        }
    }

    /// The roles of members that run on the leader's timeline.
    async fn roles(&self) -> Vec<String> {
        let Some(leader) = self.leader().await else { return Vec::new() };
        let url = format!("{}/cluster", self.url(leader));
        let asked = self.client.get(url).timeout(CALL_TIMEOUT).send().await;
        let Ok(reported) = asked else { return Vec::new() };
        let reported: Value = reported.json().await.unwrap_or_default();
        let members = reported["members"].as_array().cloned().unwrap_or_default();
        let newest = members.iter().filter_map(|it| it["timeline"].as_u64()).max();
        let run = members.iter().filter(|member| {
            ["running", "streaming"].iter().any(|state| member["state"] == *state)
                && member["timeline"].as_u64() == newest
        });
        run.filter_map(|it| it["role"].as_str().map(str::to_owned)).collect()
    }

    fn url(&self, member: usize) -> String {
        format!("http://127.0.0.1:{}", rest_port(self.first_port, member))
    }

    fn data_dir(&self, member: usize) -> PathBuf {
        self.dir.join(format!("data-{member}"))
    }

    fn member_config(&self, member: usize) -> anyhow::Result<Value> {
        // Links in another folder may lead to some of its programs, and not to all.
        let postgres = fs::canonicalize(cluster::find_binaries()?.join("postgres"))?;
        let bin_dir = postgres.parent().context("its folder")?;
        let rest = format!("127.0.0.1:{}", rest_port(self.first_port, member));
        let postgres = format!("127.0.0.1:{}", postgres_port(self.first_port, member));
        let login = json!({"username": "fencepost", "password": "unused"});
        Ok(json!({
            "scope": "fencepost",
            "name": format!("member-{member}"),
            "restapi": {"listen": rest, "connect_address": rest},
            "etcd3": {"hosts": [format!("127.0.0.1:{}", self.first_port)]},
            "bootstrap": {
                "dcs": {
                    "synchronous_mode": true,
                    "postgresql": {
                        "use_pg_rewind": true,
                        "parameters": {"max_connections": 300, "wal_log_hints": "on"},
                    },
                },
                "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, "data-checksums"],
                "pg_hba": [
                    "host all all 127.0.0.1/32 trust",
                    "host replication all 127.0.0.1/32 trust",
                ],
            },
            "postgresql": {
                "listen": postgres,
                "connect_address": postgres,
                "data_dir": self.data_dir(member),
                "bin_dir": bin_dir,
                "pgpass": self.dir.join(format!("pgpass-{member}")),
                "authentication": {"superuser": login, "replication": login, "rewind": login},
                "parameters": {"unix_socket_directories": ""},
            },
        }))
    }
}

impl Drop for Patroni {
    fn drop(&mut self) {
        for member in 0..MEMBERS {
            self.kill_member(member);
        }
        self.kill_etcd();
        let _ = self.haproxy.kill();
        let _ = self.haproxy.wait();
    }
}

fn haproxy_port(first: u16) -> u16 {
    first + 2
}

fn rest_port(first: u16, member: usize) -> u16 {
    first + 3 + member as u16
}

fn postgres_port(first: u16, member: usize) -> u16 {
    rest_port(first, member) + MEMBERS as u16
}

/// As Patroni's documentation has it.
fn haproxy_config(first_port: u16) -> String {
    let mut config = format!(
        "global\n    maxconn 1000\n\
         defaults\n    mode tcp\n    timeout connect 2s\n    timeout check 2s\n    \
         timeout client 30m\n    timeout server 30m\n\
         listen leader\n    bind 127.0.0.1:{}\n    option httpchk GET /primary\n    \
         http-check expect status 200\n    \
         default-server inter 1s fall 3 rise 1 on-marked-down shutdown-sessions\n",
        haproxy_port(first_port)
    );
    for member in 0..MEMBERS {
        let (postgres, rest) = (postgres_port(first_port, member), rest_port(first_port, member));
        config += &format!("    server member-{member} 127.0.0.1:{postgres} check port {rest}\n");
    }
    config
}

/// Starts a program as the user whom PostgreSQL runs as, with its log in the folder.
fn start(dir: &Path, program: &str, args: &[&Path]) -> anyhow::Result<Child> {
    let mut command = as_postgres(program)?;
    let log = dir.join(program).with_extension("log");
    let log = fs::File::options().create(true).append(true).open(log)?;
    command.args(args).current_dir(dir).stdin(Stdio::null());
    command.stdout(log.try_clone()?).stderr(log).spawn().with_context(|| program.to_owned())
}

fn postgres_id(which: &str) -> anyhow::Result<u32> {
    let reported = Command::new("id").args([which, "postgres"]).output()?;
    Ok(String::from_utf8_lossy(&reported.stdout).trim().parse()?)
}
