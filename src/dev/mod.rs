//! `fencepost dev`: everything on one machine, nothing to configure. Data survive a restart;
//! nothing that it started survives it.

mod banner;
pub mod cluster;
mod folder;

use std::{path::PathBuf, time::Duration};

use anyhow::Context;
use sqlx::{ConnectOptions, Connection, PgConnection, postgres::PgConnectOptions};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use self::cluster::{Cluster, Durability};
pub use self::folder::{Folder, Ready};
use crate::{
    auth::key,
    config::NodeArgs,
    domain::limits,
    ids::{KeyId, ProjectPublicId},
    serve::{self, Node},
    store::{self, keys::ListedKey, projects::Project},
    telemetry,
};

const DATABASE: &str = "fencepost";
const PROJECT: &str = "demo";
const KEY_NAME: &str = "dev";
/// How often it is checked that the database is still there.
const CHECK_PERIOD: Duration = Duration::from_millis(500);

/// What `dev` is told.
#[derive(Debug, Clone, clap::Args)]
pub struct DevArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub node: NodeArgs,

    /// Where data and key are kept [default: .fencepost here; as root, where that cannot be reached by
    /// the database's user, /var/lib/fencepost-dev]
    #[arg(long, env = "FENCEPOST_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,

    /// Throw all data of an earlier run away first, and its key
    #[arg(long)]
    pub reset: bool,

    /// Write where and how to call it into this file, as JSON, when it is ready
    #[arg(long, value_name = "FILE")]
    pub ready_file: Option<PathBuf>,
}

/// Runs until `stop` is cancelled. Call it on the main thread: see [`Cluster::start`].
///
/// # Errors
/// When another `dev` runs in the folder, an address is taken, or PostgreSQL cannot be started.
pub async fn run(args: DevArgs, stop: CancellationToken) -> anyhow::Result<()> {
    let folder = Folder::claim(args.data_dir)?;
    if let Some(path) = &args.ready_file {
        let _ = std::fs::remove_file(path);
    }
    if args.reset {
        Cluster::stop_leftover(&folder.cluster_dir())?;
        folder.reset()?;
    }
    let api = listen(args.node.listen, "--listen").await?;
    let operator = listen(args.node.metrics_listen, "--metrics-listen").await?;
    let mut cluster = Cluster::start(&folder.cluster_dir(), Durability::Safe)?;
    let database_url = cluster.database_url(DATABASE);
    make_database(&cluster).await?;
    store::pools::migrate(&database_url).await?;
    let (project, api_key) = demo_project(&database_url, &folder).await?;

    let ready = Ready {
        url: format!("http://{}", api.local_addr()?),
        metrics_url: format!("http://{}/metrics", operator.local_addr()?),
        api_key,
        project_id: project.public_id.to_string(),
        pid: std::process::id(),
        database_url: database_url.clone(),
    };
    let node = Node {
        api,
        operator: Some((operator, telemetry::install_metrics()?)),
        database_url,
        pools: args.node.pools,
        linger: Duration::ZERO,
        min_schedule_period: Duration::from_secs(args.node.min_schedule_period_seconds.into()),
    };
    folder.write_ready(&ready)?;
    if let Some(path) = &args.ready_file {
        folder::write_private(path, &serde_json::to_string(&ready.public())?)?;
    }
    banner::print(&ready, &folder);
    let serving = serve::serve(node, stop.clone());
    let watching = watch(&mut cluster);
    let ended = tokio::select! {
        served = serving => served,
        failed = watching => failed,
    };
    folder.forget_ready();
    if let Some(path) = &args.ready_file {
        let _ = std::fs::remove_file(path);
    }
    drop(cluster);
    ended
}

async fn listen(address: std::net::SocketAddr, flag: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address}; choose another address with {flag}"))
}

async fn watch(cluster: &mut Cluster) -> anyhow::Result<()> {
    loop {
        tokio::time::sleep(CHECK_PERIOD).await;
        cluster.check()?;
    }
}

async fn make_database(cluster: &Cluster) -> anyhow::Result<()> {
    let options: PgConnectOptions = cluster.database_url("postgres").parse()?;
    let mut conn = options.connect().await?;
    if !store::pools::database_exists(&mut conn, DATABASE).await? {
        store::pools::create_database(&mut conn, DATABASE).await?;
    }
    conn.close().await?;
    Ok(())
}

/// The demo project, and a key that still opens it. Both are made once.
async fn demo_project(database_url: &str, folder: &Folder) -> anyhow::Result<(Project, String)> {
    let options: PgConnectOptions = database_url.parse()?;
    let mut conn = options.connect().await?;
    let project = match store::projects::find(&mut conn, PROJECT, None).await? {
        Some(project) => project,
        None => store::projects::insert(&mut conn, ProjectPublicId::generate(), PROJECT, PROJECT)
            .await?
            .context("the demo project could not be made")?,
    };
    if let Some(api_key) = folder.read_key() {
        let owner = store::keys::find_by_secret(&mut conn, &key::hash(&api_key)).await?;
        if owner.is_some_and(|it| it.project_id == project.id) {
            return Ok((project, api_key));
        }
    }
    let (_, api_key) = create_key(&mut conn, &project, KEY_NAME).await?;
    folder.write_key(&api_key)?;
    Ok((project, api_key))
}

/// Makes a key for a project and answers with its id and with the key itself, which is not kept.
///
/// # Errors
/// When the store does not answer, or the project has as many keys as it may.
pub async fn create_key(
    conn: &mut PgConnection,
    project: &Project,
    name: &str,
) -> anyhow::Result<(KeyId, String)> {
    let api_key = key::generate();
    let (shown_prefix, shown_end) = key::shown_parts(&api_key);
    let listed = ListedKey {
        id: KeyId::generate(),
        name: name.to_owned(),
        shown_prefix,
        shown_end,
        created_at: chrono::DateTime::UNIX_EPOCH,
        revoked_at: None,
    };
    let hash = key::hash(&api_key);
    let is_kept =
        store::keys::insert(conn, project.id, &listed, &hash, limits::MAX_LIVE_KEYS).await?;
    anyhow::ensure!(
        is_kept,
        "the project has {} live keys: revoke one first",
        limits::MAX_LIVE_KEYS
    );
    Ok((listed.id, api_key))
}
