//! The comments of .proto files, by what they stand above.

use std::collections::HashMap;

use prost_reflect::DescriptorPool;

/// All comments of a pool.
pub struct Comments(HashMap<(String, Vec<i32>), String>);

impl Comments {
    /// Reads the source info of every file that has it.
    pub fn read(pool: &DescriptorPool) -> Self {
        let mut all = HashMap::new();
        for file in pool.files() {
            let proto = file.file_descriptor_proto();
            for location in proto.source_code_info.iter().flat_map(|info| &info.location) {
                let text = location.leading_comments().trim();
                if !text.is_empty() {
                    let lines: Vec<&str> = text.lines().map(str::trim).collect();
                    all.insert((file.name().to_owned(), location.path.clone()), lines.join("\n"));
                }
            }
        }
        Self(all)
    }

    /// Of what is at this path of a file.
    pub fn of(&self, file: &str, path: &[i32]) -> Option<&str> {
        self.0.get(&(file.to_owned(), path.to_vec())).map(String::as_str)
    }
}
