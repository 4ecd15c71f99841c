//! Archives with the same bytes on each node: no times, and files in the order of their names.

use std::io::{Cursor, Write};

use flate2::{Compression, GzBuilder};
use zip::{CompressionMethod, DateTime, ZipWriter, write::SimpleFileOptions};

use super::File;

/// Files that everybody may read.
const MODE: u32 = 0o644;
/// The operating system in the header of gzip: unknown.
const ANY_SYSTEM: u8 = 255;

/// A zip archive. The files are few and small, and writing to memory does not fail.
pub fn zip(files: &[File]) -> Vec<u8> {
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Deflated)
        .last_modified_time(DateTime::DEFAULT)
        .unix_permissions(MODE);
    for (name, data) in files {
        writer.start_file(name.as_str(), options).expect("few files");
        writer.write_all(data).expect("memory takes it");
    }
    writer.finish().expect("memory takes it").into_inner()
}

/// A compressed tar archive, with all files in a folder.
pub fn tar_gz(folder: &str, files: &[File]) -> Vec<u8> {
    let gzip = GzBuilder::new().operating_system(ANY_SYSTEM);
    let mut writer = tar::Builder::new(gzip.write(Vec::new(), Compression::best()));
    for (name, data) in files {
        let mut header = tar::Header::new_ustar();
        header.set_size(data.len() as u64);
        header.set_mode(MODE);
        writer
            .append_data(&mut header, format!("{folder}/{name}"), data.as_slice())
            .expect("memory takes it");
    }
    writer.into_inner().and_then(flate2::write::GzEncoder::finish).expect("memory takes it")
}
