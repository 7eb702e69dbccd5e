//! Users and groups of the image, read from its /etc/passwd and /etc/group: a static program has no NSS.

use std::{fs, path::Path};

/// Who a command runs as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// User number.
    pub uid: u32,
    /// Primary group number.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Login name, if the number has one.
    pub name: Option<String>,
    /// Home directory, "/" without an entry.
    pub home: String,
}

/// The user is not in the image.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// Neither a name of /etc/passwd nor a number.
    #[error("no user {0:?} in the image's /etc/passwd: give a name that is there, or a number")]
    User(String),
    /// Neither a name of /etc/group nor a number.
    #[error("no group {0:?} in the image's /etc/group: give a name that is there, or a number")]
    Group(String),
}

struct Entry<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

/// Finds `user` ("name", "1000", "name:group", "1000:1000"; empty: root) below `root`.
pub fn find(root: &Path, user: &str) -> Result<Identity, UserError> {
    let passwd = fs::read_to_string(root.join("etc/passwd")).unwrap_or_default();
    let group = fs::read_to_string(root.join("etc/group")).unwrap_or_default();
    resolve(&passwd, &group, user)
}

fn resolve(passwd: &str, groups: &str, user: &str) -> Result<Identity, UserError> {
    let (name, group) = match user.split_once(':') {
        Some((name, group)) => (name, Some(group).filter(|group| !group.is_empty())),
        None => (user, None),
    };
    let number = if name.is_empty() { Some(0) } else { name.parse().ok() };
    let entry = passwd.lines().filter_map(entry).find(|entry| match number {
        Some(uid) => entry.uid == uid,
        None => entry.name == name,
    });
    let mut identity = match (entry, number) {
        (Some(entry), _) => Identity {
            uid: entry.uid,
            gid: entry.gid,
            groups: memberships(groups, entry.name),
            name: Some(entry.name.to_owned()),
            home: if entry.home.is_empty() { "/".to_owned() } else { entry.home.to_owned() },
        },
        (None, Some(uid)) => {
            let home = if uid == 0 { "/root" } else { "/" };
            Identity { uid, gid: 0, groups: Vec::new(), name: None, home: home.to_owned() }
        }
        (None, None) => return Err(UserError::User(name.to_owned())),
    };
    if let Some(group) = group {
        identity.gid = group_number(groups, group).ok_or_else(|| UserError::Group(group.to_owned()))?;
        // A group that was asked for is the only one.
        identity.groups.clear();
    }
    Ok(identity)
}

fn entry(line: &str) -> Option<Entry<'_>> {
    let mut fields = line.split(':');
    let name = fields.next()?;
    let uid = fields.nth(1)?.parse().ok()?;
    let gid = fields.next()?.parse().ok()?;
    let home = fields.nth(1).unwrap_or("");
    Some(Entry { name, uid, gid, home })
}

/// Name, number and members of a line of /etc/group.
fn group_entry(line: &str) -> Option<(&str, u32, &str)> {
    let mut fields = line.split(':');
    let name = fields.next()?;
    let gid = fields.nth(1)?.parse().ok()?;
    Some((name, gid, fields.next().unwrap_or("")))
}

fn memberships(groups: &str, name: &str) -> Vec<u32> {
    groups
        .lines()
        .filter_map(group_entry)
        .filter(|(_, _, members)| members.split(',').any(|member| member == name))
        .map(|(_, gid, _)| gid)
        .collect()
}

fn group_number(groups: &str, group: &str) -> Option<u32> {
    let named = groups.lines().filter_map(group_entry).find(|(name, _, _)| *name == group);
    group.parse().ok().or(named.map(|(_, gid, _)| gid))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/sh\n# a comment\nann:x:1000:1001:Ann:/home/ann:/bin/sh\n";
    const GROUP: &str = "root:x:0:\nann:x:1001:\nvideo:x:44:bob,ann\naudio:x:29:annette\n";

    #[test]
    fn a_name_brings_its_groups_and_home() {
        let ann = resolve(PASSWD, GROUP, "ann").unwrap();
        assert_eq!((ann.uid, ann.gid, ann.groups, ann.home.as_str()), (1000, 1001, vec![44], "/home/ann"));
    }

    #[test]
    fn numbers_need_no_entry() {
        let user = resolve(PASSWD, GROUP, "4242:17").unwrap();
        assert_eq!((user.uid, user.gid, user.name, user.home.as_str()), (4242, 17, None, "/"));
        assert_eq!(resolve("", "", "").unwrap().home, "/root");
    }

    #[test]
    fn a_group_that_is_asked_for_is_the_only_one() {
        let ann = resolve(PASSWD, GROUP, "1000:video").unwrap();
        assert_eq!((ann.gid, ann.groups), (44, vec![]));
    }

    #[test]
    fn unknown_names_are_named() {
        assert!(resolve(PASSWD, GROUP, "zoe").unwrap_err().to_string().contains("no user \"zoe\""));
        assert!(resolve(PASSWD, GROUP, "ann:zoe").unwrap_err().to_string().contains("no group \"zoe\""));
    }
}
