//! `ops/backup.sh`: a real PostgreSQL archives by it, and is restored to a moment.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::{
        fs::{MetadataExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use crate::harness::{Database, LoneProject, Stage, TestServer, eventually, home, limited};
use fencepost::dev::cluster::{self, Cluster, Durability};
use fencepost_store::{connection::migrate, sweep::gauges};
use serde_json::json;

/// A PostgreSQL that archives, in a folder of its user.
struct Archiving {
    name: &'static str,
    dir: PathBuf,
    cluster: Option<Cluster>,
}

impl Archiving {
    async fn start(name: &'static str) -> Self {
        let dir = home().join(format!("{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("a folder");
        let mut this = Self { name, dir, cluster: None };
        // Its user cannot read the repository everywhere.
        fs::write(this.dir.join("backup.sh"), include_str!("../../ops/backup.sh")).expect("a file");
        this.cluster = Some(this.start_at("data"));
        let archive = this.archive();
        this.hand_over(&this.dir);
        this.succeed(&["init", &archive.display().to_string()]);
        let script = this.dir.join("backup.sh");
        let command = format!("sh {} store %p %f {}", script.display(), archive.display());
        let database = this.database();
        database.execute("alter system set archive_mode = on").await;
        database.execute(&format!("alter system set archive_command = '{command}'")).await;
        drop(this.cluster.take());
        this.cluster = Some(this.start_at("data"));
        this
    }

    fn start_at(&self, name: &str) -> Cluster {
        Cluster::start_at(&self.dir.join(name), Durability::Fast, self.socket(name))
            .expect("PostgreSQL")
    }

    fn socket(&self, name: &str) -> PathBuf {
        cluster::socket_dir(std::process::id()).with_extension(format!("{}-{name}", self.name))
    }

    fn database(&self) -> Database {
        let cluster = self.cluster.as_ref().expect("it runs");
        Database { url: cluster.database_url("postgres") }
    }

    /// The user and the group of PostgreSQL.
    fn user(&self) -> (u32, u32) {
        let owner = fs::metadata(self.dir.join("data")).expect("a folder");
        (owner.uid(), owner.gid())
    }

    /// Makes PostgreSQL's user the owner.
    fn hand_over(&self, path: &Path) {
        let (user, group) = self.user();
        chown(path, Some(user), Some(group)).expect("it is theirs");
    }

    /// The script, as PostgreSQL's user.
    fn script(&self, args: &[&str]) -> Command {
        let (user, group) = self.user();
        let binaries = cluster::find_binaries().expect("PostgreSQL");
        let postgres = fs::canonicalize(binaries.join("postgres")).expect("a file");
        let path = postgres.parent().expect("a folder").display().to_string();
        let mut command = Command::new("sh");
        command.arg(self.dir.join("backup.sh")).args(args).current_dir("/");
        command.env("PATH", format!("{path}:/usr/bin:/bin"));
        command.env("PGHOST", self.socket("data")).env("PGUSER", "fencepost");
        command.uid(user).gid(group);
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.script(args).output().expect("it runs")
    }

    fn archive(&self) -> PathBuf {
        self.dir.join("archive")
    }

    fn succeed(&self, args: &[&str]) {
        let run = self.run(args);
        assert!(run.status.success(), "{args:?}: {}", String::from_utf8_lossy(&run.stderr));
    }

    fn refuses(&self, args: &[&str], why: &str) {
        let run = self.run(args);
        let text = String::from_utf8_lossy(&run.stderr);
        assert!(!run.status.success() && text.contains(why), "{args:?}: {text}");
    }

    /// Restores into a folder, from which PostgreSQL starts.
    async fn restore(&self, how: &str, name: &str, moment: &[&str]) -> (Cluster, Database) {
        let folder = self.dir.join(name).display().to_string();
        let archive = self.archive().display().to_string();
        self.succeed(&[&[how, &archive, &folder][..], moment].concat());
        let cluster = self.start_at(name);
        let database = Database { url: cluster.database_url("postgres") };
        database.until("select pg_is_in_recovery()::int::bigint", 0).await;
        (cluster, database)
    }

    /// The types of the jobs in a restored folder, in their order.
    async fn restored(&self, name: &str, moment: &[&str]) -> String {
        let (_cluster, database) = self.restore("rehearse", name, moment).await;
        database.text("select string_agg(job_type, ' ' order by job_type) from jobs").await
    }
}

/// Waits until all that is written now is in the archive.
async fn archive_all(database: &Database) -> String {
    let last = database.text("select pg_walfile_name(pg_switch_wal())").await;
    let archived = "select count(*) from pg_stat_archiver where last_archived_wal >=";
    database.until(&format!("{archived} '{last}'"), 1).await;
    last
}

impl Drop for Archiving {
    fn drop(&mut self) {
        drop(self.cluster.take());
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn entries(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let name = |it: std::io::Result<fs::DirEntry>| it.expect("an entry").file_name();
    let mut names: Vec<_> = entries.map(|it| name(it).into_string().expect("text")).collect();
    names.sort();
    names
}

#[test]
fn postgresql_is_restored_to_a_moment_once_more_and_to_the_end_of_the_archive() {
    limited(async {
        let server = Archiving::start("restored").await;
        let (database, archive) = (server.database(), server.archive());
        migrate::migrate(&database.url).await.expect("the migrations run");
        let stage = Stage { roles: false, ..Stage::default() };
        let node = TestServer::start_as(database.clone(), stage).await;
        let t = LoneProject::at(&node.url, &database, "main").await;
        t.enqueue(json!({"job_type": "a"})).await;
        let place = archive.display().to_string();
        server.succeed(&["copy", &place]);
        t.enqueue(json!({"job_type": "b"})).await;
        // A restore begins from a copy of an earlier second.
        let [copy] = &entries(&archive.join("copies"))[..] else { panic!("one copy") };
        let second = "to_char(now() at time zone 'UTC', 'YYYYMMDD\"T\"HH24MISS\"Z\"')";
        database.until(&format!("select ({second} > '{copy}')::int::bigint"), 1).await;
        let first = database.text("select now()::text").await;
        t.enqueue(json!({"job_type": "c"})).await;
        let second = database.text("select now()::text").await;
        t.enqueue(json!({"job_type": "d"})).await;
        archive_all(&database).await;
        node.stop().await;
        assert_eq!(server.restored("end", &[]).await, "a b c d");
        // It takes the place of the first server, and archives.
        let (cluster, restored) = server.restore("restore", "first", &[&first]).await;
        restored.execute("update jobs set job_type = 'e' where job_type = 'b'").await;
        archive_all(&restored).await;
        drop(cluster);
        // The first moment was too early: what came after it is still there.
        assert_eq!(server.restored("second", &[&second]).await, "a b c");
        assert_eq!(server.restored("latest", &[]).await, "a e", "the server that is in use");
        let early = ["restore", &place, "/nowhere", "2020-01-01 00:00:00+00"];
        server.refuses(&early, "no copy is older");
        let end = server.dir.join("end").display().to_string();
        server.refuses(&["restore", &place, &end], "is not empty");
        server.succeed(&["set-aside", &end]);
        server.succeed(&["restore", &place, &end, &first]);
        assert_eq!(entries(Path::new(&end)).iter().filter(|it| *it == "before").count(), 1);
    });
}

#[test]
fn copies_of_a_week_and_their_wal_are_kept_and_no_file_of_another_server_is_overwritten() {
    limited(async {
        let server = Archiving::start("copied").await;
        let (database, archive) = (server.database(), server.archive());
        let place = archive.display().to_string();
        // Copies, and where the WAL begins that each needs: the last one is of another timeline.
        let begins = [
            ("20200101T000000Z", "000000050000000000000001"),
            ("20200102T000000Z", "000000060000000000000003"),
            ("29990101T000000Z", "000000070000000000000002"),
        ];
        for (name, first) in begins {
            let copy = archive.join("copies").join(name);
            fs::create_dir(&copy).expect("a folder");
            let label =
                format!("START WAL LOCATION: 0/2000028 (file {first})\nSTART TIMELINE: 1\n");
            fs::write(copy.join("label"), label).expect("a file");
            server.hand_over(&copy);
            fs::write(archive.join(format!("wal/{first}.gz")), "").expect("a file");
        }
        server.succeed(&["copy", &place]);
        let left = entries(&archive.join("copies"));
        assert_eq!((left.len(), left[0].as_str()), (3, "20200102T000000Z"), "a week, and a day");
        let is_kept = |name: &str| archive.join(format!("wal/{name}.gz")).exists();
        let kept = begins.map(|it| is_kept(it.1));
        assert_eq!(kept, [false, true, true], "what the copy of a later day needs stays");
        let last = archive_all(&database).await;
        let stored = archive.join(format!("wal/{last}.gz"));
        // The same file comes again when an answer was lost.
        let mine = server.dir.join("segment");
        let unpacked = Command::new("gzip").arg("-dc").arg(&stored).output().expect("it runs");
        fs::write(&mine, unpacked.stdout).expect("a file");
        let mine = mine.display().to_string();
        server.succeed(&["store", &mine, &last, &place]);
        fs::write(&mine, "another").expect("a file");
        server.refuses(&["store", &mine, &last, &place], "of another server");
        // A folder whose mount is missing.
        fs::rename(archive.join("wal"), archive.join("away")).expect("it is renamed");
        server.refuses(&["store", &mine, "new", &place], "is it mounted?");
        server.refuses(&["copy", &place], "is it mounted?");
        server.refuses(&["restore", &place], "unknown");
        database.execute("create table written as select 1").await;
        database.execute("select pg_switch_wal()").await;
        let mut conn = database.connect().await;
        eventually("the server to see it", async || {
            let server = gauges::server(&mut conn).await.expect("its statistics");
            (server.archive_failing_seconds > 0.0).then_some(())
        })
        .await;
    });
}

#[test]
fn a_copy_that_fails_is_none_and_is_tried_again() {
    limited(async {
        let server = Archiving::start("tried").await;
        let place = server.archive().display().to_string();
        let mut daily = server.script(&["daily", &place]);
        daily.env("PGHOST", "/nowhere").stderr(Stdio::piped());
        let mut daily = daily.spawn().expect("it runs");
        let lines = BufReader::new(daily.stderr.take().expect("its output")).lines();
        let says = |it: &String| it.contains("that failed; the next try is in 300 s");
        let said = lines.map_while(Result::ok).find(says);
        assert!(said.is_some());
        let stopped = Command::new("kill").arg(daily.id().to_string()).status();
        assert!(stopped.expect("it runs").success());
        assert!(daily.wait().expect("it has ended").success());
        assert_eq!(entries(&server.archive().join("copies")), Vec::<String>::new());
    });
}
