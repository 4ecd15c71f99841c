//! The server that tests share: each gets a project of its own there, and an address of its own, so
//! that tests are to each other what tenants are.

use std::{
    net::Ipv4Addr,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
};

use fencepost_store as store;

use super::{Database, TestProject, TestServer, client_builder, fresh_database};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use sqlx::Connection;

/// The first of the addresses that requests of tests come from, as the server sees them.
const FIRST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

/// The header that names the client: the server trusts it from this machine.
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

struct Shared {
    url: String,
    database: Database,
}

/// The server runs in a thread of its own: the runtimes of tests end with them.
fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    SHARED.get_or_init(|| {
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .thread_name("the shared server")
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                let server = TestServer::start(fresh_database().await).await;
                let shared = Shared { url: server.url.clone(), database: server.database.clone() };
                sender.send(shared).expect("a receiver");
                server.ended().await;
            });
        });
        receiver.recv().expect("the shared server starts")
    })
}

/// Makes a project on the shared server.
pub async fn project() -> TestProject {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    // It blocks while the server starts: this test can do nothing else.
    let Shared { url, database } = tokio::task::block_in_place(shared);
    let address = Ipv4Addr::from(u32::from(FIRST_ADDRESS) + number).to_string();
    let address = HeaderValue::try_from(address).expect("an address");
    let headers = HeaderMap::from_iter([(FORWARDED_FOR, address)]);
    let client = client_builder().default_headers(headers).build().expect("a client");
    TestProject::make(url, database, &format!("main-{number}"), client).await
}

/// Deletes the project: its schedules and retries would keep the server busy for other tests.
pub async fn delete(project: &TestProject) {
    let mut conn = shared().database.connect().await;
    let id = project.id.parse().expect("an id");
    let row = store::people::projects::find_ever(&mut conn, id).await.expect("an answer");
    store::people::projects::delete(&mut conn, row.expect("the project"))
        .await
        .expect("it is deleted");
    conn.close().await.expect("the connection closes");
}
