//! The way of a person on call to a job that does not run, and to the reason.

use fencepost_domain::access::Role;
use serde_json::json;

use super::Browser;
use crate::harness::run_alone;

#[test]
fn a_stuck_job_is_one_click_from_the_first_page_and_a_search_without_a_name_is_explained() {
    run_alone(async |t| {
        let mut browser = Browser::of_member(t, "ada@example.com", Role::Member).await;
        let page = "/console/p/main";
        let worker =
            json!({"worker_id": "w", "queues": ["billing"], "job_types": ["invoice.send"]});
        t.post("/v1/workers/register", worker).await.is(200);
        let stuck = json!({"job_type": "invoice.sent", "queue": "billing",
                           "labels": ["gpu"], "tags": {"customer": "48213"}});
        let stuck = t.enqueue(stuck).await;
        let first = browser.get(page).await;
        first.says(200, &format!("href=\"{page}/jobs/{stuck}\""));
        let why = "no live worker polls queue billing for invoice.sent; \
                   those that poll it take invoice.send";
        browser.get(&format!("{page}/jobs/{stuck}")).await.says(200, why);
        let found = browser.get(&format!("{page}/jobs?q=48213")).await;
        found.says(200, "/jobs?q=tag%3Acustomer%3D48213\">tag:customer=48213</a>");
        let refused = browser.get(&format!("{page}/jobs?q=INV-2291")).await;
        refused.says(400, "error:INV-2291</a>");
        browser.get(&format!("{page}/jobs?q=tag:a=48213")).await.says(200, "No job matches.");
        let mend = format!("{page}/jobs/{stuck}/replay");
        browser.get(&format!("{page}/jobs/{stuck}")).await.says(200, "Cancel this one");
        let form = [
            ("payload", "{}"),
            ("job_type", "invoice.send"),
            ("queue", "billing"),
            ("labels", ""),
            ("cancel", "yes"),
        ];
        let mended = browser.post(&mend, &form).await;
        let place = mended.headers["location"].to_str().expect("text").to_owned();
        let mended = place.split(['/', '?']).find(|it| it.starts_with("job_")).expect("an id");
        let made = t.job(mended).await;
        assert_eq!((&made["job_type"], &made["labels"]), (&json!("invoice.send"), &json!([])));
        assert_eq!(t.job(&stuck).await["state"], "cancelled");
        let again = browser.post(&mend, &form).await;
        assert_eq!(again.status, 303, "a job that has ended is not cancelled: {}", again.text);
        // One that has begun, or ended, since the page was shown.
        let poll = json!({"worker_id": "w", "queues": ["billing"], "job_types": ["invoice.send"]});
        let runs = t.polled(poll).await.remove(0);
        let mend = format!("{page}/jobs/{}/replay", runs["id"].as_str().expect("an id"));
        for said in ["its worker was asked to stop", "had ended before it could be cancelled"] {
            let made = browser.post(&mend, &form).await;
            let place = made.headers["location"].to_str().expect("text");
            browser.get(place).await.says(200, said);
            t.ack(&runs, "w", "succeeded").await;
        }
    });
}
