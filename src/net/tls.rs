//! The cryptography of TLS: one provider for PostgreSQL, Redis, mail and our own HTTP client.

/// Makes ring the provider of the process. Call it before the first connection: `reqwest` finds
/// none by itself.
pub fn install() {
    // It fails only when a provider is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
}
