//! One PostgreSQL for the whole run, and a fresh database for each test, cloned from a template.
//!
//! Nothing is dropped: dropping costs more than cloning. The data folder is kept between runs and
//! thrown away when it holds too many leftovers; `make unit` throws it away at its end.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        LazyLock, OnceLock,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
};

use fencepost::dev::{
    cluster::{self, Cluster, Durability},
    redis::Redis,
};
use fencepost_config::PoolArgs;
use fencepost_domain::ids::TickKey;
use fencepost_engine::{Engine, schedules::zones::Zones};
use fencepost_store::connection::{
    migrate,
    pools::Pools,
    roles::{self, Logins, Role},
};

use super::{scratch, until};
use sha2::{Digest, Sha256};
use sqlx::{ConnectOptions, Connection, Executor, PgConnection, postgres::PgConnectOptions};
use tokio_util::sync::CancellationToken;

/// Leftover databases after which the folder is made anew, at about 10 MB each.
const MAX_LEFTOVERS: i64 = 100;
/// Where Linux keeps files in memory.
const MEMORY: &str = "/dev/shm";
/// The databases of all tests take about 6 GiB.
const MEMORY_KIB: u64 = 9 * 1024 * 1024;
/// Lines of PostgreSQL's log that a test prints which cannot connect.
const SHOWN_LOG_LINES: usize = 20;

/// The variable that [`share_with`] sets.
const SHARED_VARIABLE: &str = "FENCEPOST_TEST_SERVERS";

/// A database of one test.
#[derive(Debug, Clone)]
pub struct Database {
    /// Where it is.
    pub url: String,
}

impl Database {
    /// An engine without a server: the test makes the steps of its loops when it wants.
    pub fn engine(&self) -> Engine {
        let pools = Pools::new(&self.url, PoolArgs::default(), None).expect("a URL");
        Engine::start(pools, TickKey::new(b"test"), Zones::new(None), CancellationToken::new())
    }

    /// A connection of the test's own.
    pub async fn connect(&self) -> PgConnection {
        let options: PgConnectOptions = self.url.parse().expect("a URL");
        options.connect().await.expect("a connection")
    }

    /// Does something to the rows that no caller could do, such as making them older.
    pub async fn execute(&self, sql: &str) {
        let mut conn = self.connect().await;
        conn.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned())))
            .await
            .expect("the statement runs");
        // Its reads would be counted when the server has noticed the end of the connection.
        conn.execute("select pg_stat_force_next_flush()").await.expect("it runs");
        conn.close().await.expect("the connection closes");
    }

    /// Asks for a text.
    pub async fn text(&self, sql: &str) -> String {
        let mut conn = self.connect().await;
        let text = sqlx::query_scalar(sqlx::AssertSqlSafe(sql.to_owned()));
        let text = text.fetch_one(&mut conn).await.expect("a text");
        conn.close().await.expect("the connection closes");
        text
    }

    /// One number.
    pub async fn number(&self, sql: &str) -> i64 {
        let mut conn = self.connect().await;
        let number = sqlx::query_scalar(sqlx::AssertSqlSafe(sql.to_owned()));
        let number = number.fetch_one(&mut conn).await.expect("a number");
        conn.close().await.expect("the connection closes");
        number
    }

    /// Waits until a query answers with this number.
    pub async fn until(&self, sql: &str, number: i64) {
        until(format!("{number} from `{sql}`"), async || self.number(sql).await == number).await;
    }

    /// Waits until a query answers with at least this number.
    pub async fn until_at_least(&self, sql: &str, number: i64) {
        let what = format!("at least {number} from `{sql}`");
        until(what, async || self.number(sql).await >= number).await;
    }
}

/// Invariants of rows, in every database of the tests.
const CHECKS: &str = include_str!("checks.sql");

struct Shared {
    /// The Redis of all tests: each instance has names of its own in it.
    redis_url: String,
    /// With `{}` for the database's name.
    url: String,
    template: String,
}

/// A migrated, empty database that no other test sees.
pub async fn fresh_database() -> Database {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let shared = shared();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("test_{}_{number}", std::process::id());
    let mut conn = connect(&shared.url, "postgres").await;
    clone_template(&mut conn, &name, &shared.template).await;
    let database = Database { url: shared.url.replace("{}", &name) };
    // Its keys in Redis are unique.
    database.execute("update instance set public_id = gen_random_uuid()").await;
    database
}

/// The Redis of all tests.
pub fn redis_url() -> String {
    shared().redis_url.clone()
}

async fn connect(url: &str, database: &str) -> PgConnection {
    let options: PgConnectOptions = url.replace("{}", database).parse().expect("a URL");
    options.connect().await.unwrap_or_else(|error| {
        panic!("the cluster does not answer: {error}; the end of its log:\n{}", end_of_log())
    })
}

/// Why PostgreSQL ended, if it did: it takes all later tests with it.
fn end_of_log() -> String {
    let log = fs::read_to_string(home().join("postgres.log")).unwrap_or_default();
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(SHOWN_LOG_LINES)..].join("\n")
}

/// The folder of this checkout's tests: in memory if there is room. On a disk, deleting the
/// databases of a run took most of a minute.
pub fn home() -> PathBuf {
    static HOME: LazyLock<PathBuf> = LazyLock::new(|| {
        let place = Sha256::digest(env!("CARGO_MANIFEST_DIR").as_bytes());
        let name = format!("fencepost-test-{:02x}{:02x}", place[0], place[1]);
        let in_memory = Path::new(MEMORY).join(&name);
        match in_memory.exists() || has_memory() {
            true => in_memory,
            false => Path::new("/var/tmp").join(name),
        }
    });
    HOME.clone()
}

/// True if files may take this much memory, and it is free.
fn has_memory() -> bool {
    let files = Command::new("df").args(["-Pk", MEMORY]).output();
    let files =
        files.map_or_else(|_| String::new(), |df| String::from_utf8_lossy(&df.stdout).into());
    let files = files.lines().nth(1).and_then(|line| line.split_whitespace().nth(3));
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let memory = memory.and_then(|text| text.split_whitespace().next());
    [files, memory]
        .iter()
        .all(|kib| kib.and_then(|kib| kib.parse::<u64>().ok()).is_some_and(|kib| kib >= MEMORY_KIB))
}

async fn clone_template(conn: &mut PgConnection, name: &str, template: &str) {
    let sql = format!("create database {name} template {template} strategy wal_log");
    conn.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(sql))).await.expect("the template is cloned");
}

/// Lets a process of a test use the servers of this one: it would wait for the end of this run.
pub fn share_with(command: &mut Command) {
    let Shared { redis_url, url, template } = shared();
    command.env(SHARED_VARIABLE, [redis_url.as_str(), url, template].join("\n"));
}

/// The servers of the process that has started this one, if it shares them.
fn shared_by_parent() -> Option<Shared> {
    let text = std::env::var(SHARED_VARIABLE).ok()?;
    let mut lines = text.lines().map(str::to_owned);
    Some(Shared { redis_url: lines.next()?, url: lines.next()?, template: lines.next()? })
}

/// Waits until the servers of all tests run; the first test that asks starts them.
pub fn start_servers() {
    shared();
}

fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    SHARED.get_or_init(|| {
        if let Some(shared) = shared_by_parent() {
            return shared;
        }
        let (sender, receiver) = mpsc::channel();
        // The cluster ends with the thread that started it, and tests' threads end too soon.
        std::thread::spawn(move || {
            let (_cluster, _redis, _lock, shared) = start();
            sender.send(shared).expect("a receiver");
            loop {
                std::thread::park();
            }
        });
        receiver.recv().expect("the tests' PostgreSQL starts")
    })
}

fn start() -> (Cluster, Redis, File, Shared) {
    let home = home();
    fs::create_dir_all(&home).expect("a folder");
    let lock = File::create(home.join("lock")).expect("a lock file");
    // Another run of these tests has it: wait for its end.
    lock.lock().expect("the lock");
    sweep(&home);
    let dir = home.join("postgres");
    // Another version of PostgreSQL cannot read what this one has written.
    let written_by = fs::read_to_string(dir.join("PG_VERSION")).ok();
    let written_by = written_by.and_then(|it| it.trim().parse().ok());
    let installed = cluster::find_binaries().ok().and_then(|it| cluster::version(&it));
    if written_by.is_some() && written_by != installed {
        fs::remove_dir_all(&dir).expect("the folder goes");
    }
    let mut cluster = Cluster::start(&dir, Durability::Fast).expect("PostgreSQL starts");
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    if runtime.block_on(leftovers(&cluster)) > MAX_LEFTOVERS {
        drop(cluster);
        fs::remove_dir_all(&dir).expect("the folder goes");
        cluster = Cluster::start(&dir, Durability::Fast).expect("PostgreSQL starts");
    }
    let url = cluster.database_url("{}");
    let template = runtime.block_on(template(&url));
    let redis = Redis::start(&Redis::dir(std::process::id())).expect("Redis starts");
    let redis_url = redis.url();
    (cluster, redis, lock, Shared { redis_url, url, template })
}

/// Removes the socket's folder of the last run, which ended with its process, and notes this one's.
fn sweep(home: &Path) {
    let note = home.join("pid");
    let last = fs::read_to_string(&note).ok().and_then(|it| it.parse().ok());
    if let Some(pid) = last.filter(|it| !cluster::is_running(*it)) {
        let _ = fs::remove_dir_all(cluster::socket_dir(pid));
        let _ = fs::remove_dir_all(Redis::dir(pid));
    }
    fs::write(&note, std::process::id().to_string()).expect("the note is written");
}

async fn leftovers(cluster: &Cluster) -> i64 {
    let mut conn = connect(&cluster.database_url("{}"), "postgres").await;
    sqlx::query_scalar("select count(*) from pg_database")
        .fetch_one(&mut conn)
        .await
        .expect("a count")
}

/// Passwords of the roles. Any would do: the tests' PostgreSQL asks for none.
pub fn logins() -> &'static Logins {
    static LOGINS: LazyLock<Logins> = LazyLock::new(|| {
        let folder = scratch("roles");
        for role in Role::ALL {
            fs::write(folder.join(role.file()), "0123456789abcdef").expect("a password");
        }
        Logins::read(&folder).expect("logins")
    });
    &LOGINS
}

/// The migrated database of these very migrations; made once, under a name that is theirs.
async fn template(url: &str) -> String {
    let mut hash = Sha256::new();
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/migrations");
    let mut files: Vec<_> =
        fs::read_dir(dir).expect("migrations").map(|it| it.expect("a file").path()).collect();
    files.sort();
    for file in files {
        hash.update(fs::read(file).expect("a migration"));
    }
    hash.update(include_str!("../../../ops/roles.sql"));
    hash.update(CHECKS);
    let hash: String = hash.finalize().iter().take(8).map(|it| format!("{it:02x}")).collect();
    let name = format!("template_{hash}");
    let mut conn = connect(url, "postgres").await;
    let exists = sqlx::query("select 1 from pg_database where datname = $1").bind(&name);
    if exists.fetch_optional(&mut conn).await.expect("an answer").is_none() {
        // Under another name until it is complete.
        let half = format!("{name}_half");
        for sql in [format!("drop database if exists {half}"), format!("create database {half}")] {
            conn.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(sql))).await.expect("it runs");
        }
        migrate::migrate(&url.replace("{}", &half)).await.expect("the migrations run");
        roles::install(&url.replace("{}", &half), logins()).await.expect("the roles are made");
        let mut migrated = connect(url, &half).await;
        migrated.execute(sqlx::raw_sql(CHECKS)).await.expect("the checks are added");
        migrated.close().await.expect("the connection closes");
        let rename = format!("alter database {half} rename to {name}");
        conn.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(rename))).await.expect("it is renamed");
    }
    name
}

/// Bytes of all rows of the project and of its outbox, in whatever table.
pub const ALL_ROWS: &str = "
    select sum(number_of(format(
        'select coalesce(sum(pg_column_size(it.*)), 0)
         from %I it
         where project_id not in (select id from projects where kind = ''canary'')', name
    )))::bigint
    from (
        select it.table_name as name
        from information_schema.columns it
        join information_schema.tables using (table_schema, table_name)
        where table_schema = 'public' and table_type = 'BASE TABLE'
            and it.column_name = 'project_id' and it.data_type = 'integer'
    ) tables";
