//! The page that approves the login of a terminal.

use askama::Template;
use axum::{
    Extension,
    http::{HeaderMap, Method},
    response::Response,
};
use chrono::{DateTime, Utc};
use fencepost_domain::{
    access::{KeyPreset, Permission, role_may},
    error::Error,
};
use fencepost_http::routes::{
    auth::device::PendingDevice,
    projects::{Project, ProjectList},
};
use fencepost_identity::accounts::{Client, device_login};
use serde_json::json;

use super::{
    action_table,
    api::Api,
    form::{AskedFields, Fields},
    format,
    location::{HX_REQUEST, segment},
    page::{refused_page, render},
    session::go,
};

const PAGE: &str = "/console/device";

/// Rights that a terminal may ask for.
const PRESETS: [(KeyPreset, &str); 5] = [
    (KeyPreset::Operator, "On call: read, and manage queues, dead letters and schedules"),
    (KeyPreset::Producer, "Enqueue and read"),
    (KeyPreset::Worker, "Work"),
    (KeyPreset::ReadOnly, "Read all but payloads"),
    (KeyPreset::Full, "Everything that keys may do, also create keys"),
];

#[derive(Template)]
#[template(path = "device.html")]
struct Device {
    code: String,
    /// None: no code was typed, or no pending login has it.
    pending: Option<PendingDevice>,
    is_wrong: bool,
    /// Projects that the visitor may create keys in.
    projects: Vec<Project>,
    /// Address of the visitor.
    here: String,
    done: Option<&'static str>,
    now: DateTime<Utc>,
}

/// Asks for the code, or shows whose it is.
pub async fn page(
    api: Api,
    Extension(client): Extension<Client>,
    AskedFields(asked): AskedFields,
) -> Result<Response, Error> {
    if !api.is_logged_in() {
        return Err(Error::Unauthorized);
    }
    let code = device_login::as_shown(asked.text("code").trim());
    // Beside a code, a link could put words into the console's mouth.
    let done = asked.get(action_table::DONE).filter(|_| code.is_empty());
    let done = done.and_then(action_table::said);
    let (here, now) = (client.address.to_string(), format::now());
    let ask =
        Device { code, pending: None, is_wrong: false, projects: Vec::new(), here, done, now };
    if ask.code.is_empty() {
        return render(&ask);
    }
    let request = json!({"user_code": ask.code}).to_string();
    match api.send(Method::POST, "/v1/auth/device/preview", Some(request)).await {
        Ok(pending) => {
            let ProjectList { mut projects } = api.get("/v1/projects").await?;
            projects.retain(|project| {
                let may_approve = project.role.is_some_and(|it| role_may(it, Permission::Govern));
                may_approve && project.suspended_at.is_none()
            });
            render(&Device { pending: Some(pending), projects, ..ask })
        }
        Err(error @ Error::Invalid(_)) => {
            Ok(refused_page(render(&Device { is_wrong: true, ..ask })?, error))
        }
        Err(other) => Err(other),
    }
}

/// Approves or refuses the terminal that shows the code.
pub async fn decide(api: Api, headers: HeaderMap, form: Fields) -> Result<Response, Error> {
    let code = form.text("code");
    let (path, request, done) = match form.get("refuse") {
        Some(_) => {
            let path = "/v1/auth/device/refuse".to_owned();
            (path, json!({"user_code": code}), "auth_refuse_device")
        }
        None => {
            let path = format!("/v1/projects/{}/devices/approve", segment(form.text("project")));
            let request = json!({"user_code": code, "preset": form.text("preset")});
            (path, request, "projects_approve_device")
        }
    };
    api.send::<()>(Method::POST, &path, Some(request.to_string())).await?;
    Ok(go(headers.contains_key(HX_REQUEST), &action_table::saying(PAGE, done)))
}
