//! Names of those who change jobs.

use std::collections::HashMap;

use sqlx::PgConnection;

use fencepost_domain::ids::{AccountId, KeyId, ProjectId};

/// The names of keys, revoked ones too, by their public ids.
pub async fn names_of_keys(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[KeyId],
) -> sqlx::Result<HashMap<String, String>> {
    let rows = sqlx::query!(
        r#"select id "id: KeyId", name from api_keys where project_id = $1 and id = any($2)"#,
        project_id.0,
        &ids.iter().map(|it| it.0).collect::<Vec<_>>(),
    );
    let rows = rows.fetch_all(conn).await?.into_iter();
    Ok(rows.map(|it| (it.id.to_string(), it.name)).collect())
}

/// The addresses of members, by the public ids of their accounts. Those who have left have none.
pub async fn names_of_members(
    conn: &mut PgConnection,
    project_id: ProjectId,
    ids: &[AccountId],
) -> sqlx::Result<HashMap<String, String>> {
    let rows = sqlx::query!(
        r#"
        select account.id "id: AccountId", account.email
        from members member
        join accounts account on account.id = member.account_id
        where member.project_id = $1 and member.account_id = any($2)
        "#,
        project_id.0,
        &ids.iter().map(|it| it.0).collect::<Vec<_>>(),
    );
    let rows = rows.fetch_all(conn).await?.into_iter();
    Ok(rows.map(|it| (it.id.to_string(), it.email)).collect())
}
