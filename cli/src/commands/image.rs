//! `torpor image …`

use clap::{Args, Subcommand};
use serde::Serialize;
use tonic::Streaming;
use torpor_sdk::{Error, v1};

use super::Outcome;
use crate::{
    failure::Failure,
    output::{
        clean,
        table::{age, bytes, table},
        view,
    },
    progress::Progress,
    session::Session,
};

#[derive(Subcommand)]
pub enum ImageCommand {
    /// Build one of the known images from packages.
    Build(BuildArgs),
    /// Make an image of a root file system, a tar file or a directory on the gateway's host, for every driver.
    Import(ImportArgs),
    /// Have the docker or podman driver fetch an image from its registry.
    Pull(PullArgs),
    /// List images.
    #[command(visible_alias = "ls")]
    List,
    /// Remove images that no sandbox uses.
    #[command(visible_alias = "remove")]
    Rm(RmArgs),
}

#[derive(Args)]
pub struct BuildArgs {
    /// What to build: debian.
    recipe: String,
    /// Name of the image; the recipe's when left out.
    #[arg(long, default_value = "", hide_default_value = true)]
    name: String,
    /// One more package to put in. May be repeated.
    #[arg(short, long = "package", value_name = "PACKAGE")]
    packages: Vec<String>,
}

#[derive(Args)]
pub struct ImportArgs {
    /// Name of the image.
    name: String,
    /// The tar file or directory.
    path: String,
}

#[derive(Args)]
pub struct PullArgs {
    /// The image, as its registry knows it: docker.io/library/alpine:3.
    image: String,
    /// Which driver fetches it; the gateway's default when left out.
    #[arg(long, default_value = "", hide_default_value = true)]
    driver: String,
}

#[derive(Args)]
pub struct RmArgs {
    /// Names or digests.
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
    /// An image that isn't there is no failure.
    #[arg(long)]
    allow_missing: bool,
}

/// What became of one image.
#[derive(Serialize)]
struct Removed {
    name: String,
    removed: bool,
    freed_bytes: u64,
}

/// Runs one of the commands for images.
pub async fn run(session: &Session, command: ImageCommand) -> Outcome {
    match command {
        ImageCommand::Build(args) => {
            let label = if args.name.is_empty() { args.recipe.clone() } else { args.name.clone() };
            let request =
                v1::BuildImageRequest { recipe: args.recipe, name: args.name, packages: args.packages };
            let stream = session.connect().await?.build_image(request).await?;
            follow(session, &label, stream).await
        }
        ImageCommand::Import(args) => {
            let path = session.host_path(&args.path)?;
            let request = v1::ImportImageRequest { name: args.name.clone(), path };
            let stream = session.connect().await?.import_image(request).await?;
            follow(session, &args.name, stream).await
        }
        ImageCommand::Pull(args) => {
            let request = v1::PullImageRequest { image: args.image.clone(), driver: args.driver };
            let stream = session.connect().await?.pull_image(request).await?;
            follow(session, &args.image, stream).await
        }
        ImageCommand::List => list(session).await,
        ImageCommand::Rm(args) => remove(session, args).await,
    }
}

async fn follow(session: &Session, label: &str, mut stream: Streaming<v1::ImageProgress>) -> Outcome {
    let progress = Progress::new(session.shows_progress(), label);
    let mut image = None;
    while let Some(message) = stream.message().await.map_err(Error::from)? {
        let detail = if message.detail.is_empty() { String::new() } else { format!(": {}", message.detail) };
        progress.step(&format!("{}{detail}", message.step));
        image = message.image.or(image);
    }
    drop(progress);
    let image = image.ok_or(Error::Protocol("the work ended without an image"))?;
    session.print(
        &view::ImageRow::from(&image),
        || vec![image.name.clone()],
        || format!("{} {} ({})\n", clean(&image.name), clean(&image.digest), bytes(image.used_bytes)),
    )?;
    Ok(0)
}

async fn list(session: &Session) -> Outcome {
    let images = session.connect().await?.list_images().await?;
    let views: Vec<_> = images.iter().map(view::ImageRow::from).collect();
    session.print(&views, || images.iter().map(|i| i.name.clone()).collect(), || rows(&images))?;
    Ok(0)
}

fn rows(images: &[v1::Image]) -> String {
    let row = |i: &v1::Image| {
        // "sha256:" and twelve digits tell images apart.
        let digest = i.digest.chars().take(19).collect();
        let created = age(i.created.as_ref());
        [i.name.clone(), digest, bytes(i.size_bytes), bytes(i.used_bytes), created, i.sandboxes.to_string()]
    };
    table(["NAME", "DIGEST", "SIZE", "USED", "AGE", "SANDBOXES"], images.iter().map(row))
}

async fn remove(session: &Session, args: RmArgs) -> Outcome {
    let client = session.connect().await?;
    let mut code = 0;
    let mut done = Vec::new();
    for name in &args.images {
        match client.remove_image(name, args.allow_missing).await {
            Ok(r) => {
                done.push(Removed { name: name.clone(), removed: r.removed, freed_bytes: r.freed_bytes })
            }
            Err(error) => {
                let failure = Failure::from(error);
                code = if code == 0 { failure.code } else { code };
                failure.print(if args.images.len() == 1 { "" } else { name });
            }
        }
    }
    let line = |r: &Removed| match r.removed {
        true => format!("{} removed, {} freed\n", clean(&r.name), torpor_sandbox::spec::size(r.freed_bytes)),
        false => format!("{} absent\n", clean(&r.name)),
    };
    let names = || done.iter().map(|r| r.name.clone()).collect();
    session.print(&done, names, || done.iter().map(line).collect())?;
    Ok(code)
}
