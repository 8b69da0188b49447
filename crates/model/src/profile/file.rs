//! Files with exact profiles of the user's own.

use std::collections::BTreeSet;
use std::path::Path;

use super::{
    Artifact, Capability, GraphKind, Implementation, LoaderKind, LoopKind, Profile, ProfileError,
    Specialization,
};
use crate::checkpoint::read_json_object;
use crate::config::unknown;
use crate::{Error, Fields, Result, Tier};

/// Reads exact profiles from a JSON file: an object whose `profiles` is a list of them, each in the form in
/// which `russet inspect --json` prints a profile.
///
/// # Errors
/// Naming the file and the field that is missing, unknown, or does not fit the others.
pub fn read_profiles(path: &Path) -> Result<Vec<Profile>> {
    let map = read_json_object(path)?.ok_or_else(|| Error::file(path, "does not exist"))?;
    let root = Fields::new(path, &map);
    root.only(&["profiles"])?;
    let profiles = root.objects("profiles")?.ok_or_else(|| root.error("profiles", "is missing"))?;
    profiles.iter().map(profile).collect()
}

fn profile(fields: &Fields<'_>) -> Result<Profile> {
    fields.only(&[
        "id",
        "artifact_fingerprint",
        "config_fingerprint",
        "fidelity",
        "required_capabilities",
        "execution",
    ])?;
    let id = fields.required_text("id")?;
    let artifact = artifact(fields)?;
    let tier = tier(&required_object(fields, "fidelity")?)?;
    let (graph, specialization) = execution(&required_object(fields, "execution")?)?;
    let field = "required_capabilities";
    let names = fields.texts(field)?.ok_or_else(|| fields.error(field, "is missing"))?;
    let required: BTreeSet<Capability> = names
        .iter()
        .enumerate()
        .map(|(i, name)| known(fields, &format!("{field}[{i}]"), name, Capability::ALL, Capability::id))
        .collect::<Result<_>>()?;
    Profile::exact(id, artifact, tier, required, graph, specialization).map_err(|error| {
        let at = if error == ProfileError::Id { "id" } else { field };
        fields.error(at, error.to_string())
    })
}

fn artifact(fields: &Fields<'_>) -> Result<Artifact> {
    let (artifact_field, config_field) = ("artifact_fingerprint", "config_fingerprint");
    let missing = |field| fields.error(field, "is missing: a profile is for one artifact and its config");
    let artifact = fields.text(artifact_field)?.ok_or_else(|| missing(artifact_field))?;
    let config = fields.text(config_field)?.ok_or_else(|| missing(config_field))?;
    Ok(Artifact {
        fingerprint: artifact
            .parse()
            .map_err(|e: ProfileError| fields.error(artifact_field, e.to_string()))?,
        config: config.parse().map_err(|e: ProfileError| fields.error(config_field, e.to_string()))?,
    })
}

fn tier(fields: &Fields<'_>) -> Result<Tier> {
    fields.only(&["tier", "oracle", "claim"])?;
    let tier = one_of(fields, "tier", Tier::ALL, Tier::id)?;
    if fields.text("oracle")? != tier.oracle() {
        let oracle = tier.oracle().map_or("no oracle (null)".into(), |oracle| format!("the oracle {oracle}"));
        return Err(fields.error("oracle", format!("tier {} has {oracle}", tier.id())));
    }
    if fields.required_text("claim")? != tier.claim() {
        return Err(fields.error("claim", format!("tier {} has the claim {}", tier.id(), tier.claim())));
    }
    Ok(tier)
}

fn execution(fields: &Fields<'_>) -> Result<(GraphKind, Specialization)> {
    fields.only(&["loader", "graph", "loop", "specialization", "implementation"])?;
    let graph = one_of(fields, "graph", GraphKind::ALL, GraphKind::id)?;
    let loader = one_of(fields, "loader", LoaderKind::ALL, LoaderKind::id)?;
    if loader != graph.loader() {
        let message = format!("graph {graph} is loaded by {}, not by {loader}", graph.loader());
        return Err(fields.error("loader", message));
    }
    let loop_kind = one_of(fields, "loop", LoopKind::ALL, LoopKind::id)?;
    if loop_kind != graph.loop_kind() {
        let message = format!("graph {graph} runs in the loop {}, not in {loop_kind}", graph.loop_kind());
        return Err(fields.error("loop", message));
    }
    let implementation = fields
        .text("implementation")?
        .map(|name| Implementation::new(name).ok_or_else(|| fields.error("implementation", "is blank")))
        .transpose()?;
    let specialization = match fields.required_text("specialization")? {
        "artifact" => Specialization::Artifact { implementation },
        _ if implementation.is_some() => {
            let message = "only the specialization artifact may name an implementation";
            return Err(fields.error("implementation", message));
        }
        "dedicated" => Specialization::Dedicated,
        "generated" => Specialization::Generated,
        "generic" => Specialization::Generic,
        other => return Err(fields.error("specialization", unknown(other, &Specialization::IDS))),
    };
    Ok((graph, specialization))
}

fn required_object<'a>(fields: &Fields<'a>, field: &str) -> Result<Fields<'a>> {
    fields.object(field)?.ok_or_else(|| fields.error(field, "is missing"))
}

/// The value whose id a field holds.
fn one_of<T: Copy>(fields: &Fields<'_>, field: &str, all: &[T], id: fn(T) -> &'static str) -> Result<T> {
    known(fields, field, fields.required_text(field)?, all, id)
}

fn known<T: Copy>(
    fields: &Fields<'_>,
    field: &str,
    name: &str,
    all: &[T],
    id: fn(T) -> &'static str,
) -> Result<T> {
    all.iter().copied().find(|&value| id(value) == name).ok_or_else(|| {
        let ids: Vec<&str> = all.iter().map(|&value| id(value)).collect();
        fields.error(field, unknown(name, &ids))
    })
}
