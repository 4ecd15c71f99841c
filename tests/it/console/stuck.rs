//! The way of a person on call to a job that does not run, and to the reason.

use fencepost::domain::access::Role;
use serde_json::json;

use super::Browser;
use crate::harness::run;

#[test]
fn a_stuck_job_is_one_click_from_the_first_page_and_a_search_without_a_name_is_explained() {
    run(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Member).await;
        let page = "/console/p/main";
        let worker =
            json!({"worker_id": "w", "queues": ["billing"], "job_types": ["invoice.send"]});
        t.post("/v1/workers/register", worker).await.is(200);
        let stuck = t.enqueue(json!({"job_type": "invoice.sent", "queue": "billing"})).await;
        let first = browser.get(page).await;
        first.says(200, &format!("href=\"{page}/jobs/{stuck}\""));
        let why = "no live worker polls queue billing for invoice.sent; \
                   those that poll it take invoice.send";
        browser.get(&format!("{page}/jobs/{stuck}")).await.says(200, why);
        let found = browser.get(&format!("{page}/jobs?q=48213")).await;
        found.says(200, "<code>tag:name=48213</code>");
        browser.get(&format!("{page}/jobs?q=tag:a=48213")).await.says(200, "No job matches.");
    });
}
