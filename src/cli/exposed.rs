//! Secrets on the command line.

/// Flags of these arguments that have a URL with a password: other users of the machine can read
/// command lines.
pub fn passwords(arguments: impl Iterator<Item = String>) -> Vec<&'static str> {
    const FLAGS: [&str; 3] = ["--database-url", "--redis-url", "--smtp-url"];
    let arguments: Vec<_> = arguments.collect();
    let has_password = |url: &str| {
        let login = url.split_once("://").and_then(|it| it.1.split_once('@'));
        login.is_some_and(|(login, _)| login.contains(':'))
    };
    let is_exposed = |flag: &str| {
        let joined = arguments.iter().filter_map(|it| it.strip_prefix(flag)?.strip_prefix('='));
        let apart = arguments.windows(2).filter(|it| it[0] == flag).map(|it| it[1].as_str());
        joined.chain(apart).any(has_password)
    };
    FLAGS.into_iter().filter(|it| is_exposed(it)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_on_the_command_line_is_noticed() {
        let exposed = |line: &str| passwords(line.split(' ').map(str::to_owned));
        assert_eq!(
            exposed("serve --database-url postgres://u:p@db/f --redis-url=redis://:p@redis"),
            ["--database-url", "--redis-url"]
        );
        assert!(exposed("serve --database-url postgres://u@db/f --redis-url").is_empty());
        assert!(exposed("serve --database-url-file /run/a:b@c").is_empty());
    }
}
