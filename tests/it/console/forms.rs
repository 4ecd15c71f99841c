//! Two who fill in the same form: none undoes what the other has saved.

use fencepost_domain::access::Role;
use serde_json::json;

use super::{Browser, form_with, pairs};
use crate::harness::run_alone;

#[test]
fn what_a_form_has_not_changed_is_not_undone_by_it() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Member).await;
        t.enqueue(json!({})).await;
        let queue = format!("/console/p/{}/queues/default", t.id);
        let save = format!("/console/p/{}/do/queues_update", t.id);
        let opened = browser.get(&queue).await.text;
        let theirs = json!({"max_concurrency": 3, "rate_limit": {"count": 5, "per_seconds": 60}});
        t.patch("/v1/queues/default", theirs).await.is(200);
        let keep_for_30_days = |page: &str| {
            let mut form = form_with(page, "max_concurrency");
            for (name, value) in &mut form {
                if name == "retention_days" {
                    "30".clone_into(value);
                }
            }
            form
        };
        let late = browser.post(&save, &pairs(&keep_for_30_days(&opened))).await;
        late.says(412, "was changed meanwhile");
        let opened = browser.get(&queue).await.text;
        let form = keep_for_30_days(&opened);
        assert_eq!(browser.post(&save, &pairs(&form)).await.status, 303);
        let queue = t.get("/v1/queues/default").await.is(200);
        assert_eq!((&queue["retention_days"], &queue["max_concurrency"]), (&json!(30), &json!(3)));
        assert_eq!(queue["rate_limit"], json!({"count": 5, "per_seconds": 60}));
        // Nothing was changed at all.
        let again = browser.get(&format!("/console/p/{}/queues/default", t.id)).await.text;
        let form = form_with(&again, "max_concurrency");
        browser
            .post(&save, &pairs(&form))
            .await
            .goes("/console/p/main/queues/default?done=nothing");
        let mut viewer = Browser::of_member(t, "eve@example.com", Role::Viewer).await;
        let elsewhere = form.iter().map(|(name, value)| match name.as_str() {
            "queue" => ("queue", "nowhere"),
            _ => (name.as_str(), value.as_str()),
        });
        let elsewhere: Vec<_> = elsewhere.collect();
        viewer.post(&save, &elsewhere).await.says(404, "Not found");
    });
}

#[test]
fn a_form_of_a_project_does_not_overwrite_what_another_has_saved_since() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Owner).await;
        let settings = format!("/console/p/{}/settings", t.id);
        let save = format!("/console/p/{}/do/projects_update", t.id);
        let opened = browser.get(&settings).await.text;
        let form = |name: &'static str| {
            let form = form_with(&opened, "require_fence");
            let named = form.into_iter().filter(|it| it.0 != "name");
            named.chain([("name".to_owned(), name.to_owned())]).collect::<Vec<_>>()
        };
        assert_eq!(browser.post(&save, &pairs(&form("First"))).await.status, 303);
        let late = browser.post(&save, &pairs(&form("Second"))).await;
        late.says(412, "was changed meanwhile");
        browser.get(&settings).await.says(200, "First");
    });
}
