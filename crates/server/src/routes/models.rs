//! Lists of what is served: models, settings, what runs.

use http::Response;
use serde_json::{Value, json};

use crate::{
    body::Body,
    error::{ApiError, Kind},
    http::{Call, unescaped},
    models::Status,
};

/// The union of what OpenAI's and Anthropic's clients read. The status is as llama.cpp's server tells it.
fn describe(model: &Status) -> Value {
    let info = &model.info;
    json!({
        "id": info.name,
        "object": "model",
        "created": info.loaded,
        "owned_by": "carat",
        "type": "model",
        "display_name": info.name,
        "created_at": rfc3339(info.loaded),
        "max_model_len": info.context,
        "status": { "value": model.state.name(), "failure": model.failure },
        "meta": {
            "n_ctx": info.context,
            "n_ctx_train": info.trained_context,
            "n_params": info.parameters,
            "size": info.bytes,
            "quantization": info.quantization,
            "vision": false,
        },
    })
}

/// Answers while the only model is being loaded, too, with an empty list: clients ask for it first of all.
pub(super) fn list(call: &Call) -> Result<Response<Body>, ApiError> {
    let data: Vec<Value> = match call.app.models() {
        Ok(models) => models.statuses().iter().map(describe).collect(),
        Err(error) if error.kind == Kind::Loading => Vec::new(),
        Err(error) => return Err(error),
    };
    let id = |model: Option<&Value>| model.map(|model| model["id"].clone());
    Ok(Body::json(&json!({
        "object": "list",
        "has_more": false,
        "first_id": id(data.first()),
        "last_id": id(data.last()),
        "data": data,
    })))
}

pub(super) fn one(call: &Call) -> Result<Response<Body>, ApiError> {
    let last = call.parts.uri.path().rsplit('/').next();
    let asked = last.map(unescaped);
    Ok(Body::json(&describe(&call.app.told(asked.as_deref())?)))
}

pub(super) fn props(call: &Call) -> Result<Response<Body>, ApiError> {
    let model = call.app.told(call.query("model").as_deref())?;
    let (info, sampling) = (&model.info, &model.sampling);
    Ok(Body::json(&json!({
        "default_generation_settings": {
            "n_ctx": info.context,
            "params": {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "repeat_penalty": sampling.repeat_penalty,
                "presence_penalty": sampling.presence_penalty,
                "frequency_penalty": sampling.frequency_penalty,
            },
        },
        "total_slots": model.parallel,
        "model_path": info.name,
        "model_alias": info.name,
        "chat_template": info.template,
        "build_info": format!("carat {}", env!("CARGO_PKG_VERSION")),
        "backend": info.backend,
        "fingerprint": info.fingerprint,
        "status": model.state.name(),
    })))
}

pub(super) fn slots(call: &Call) -> Result<Response<Body>, ApiError> {
    let model = call.app.told(call.query("model").as_deref())?;
    let running = model.snapshot.stats.running;
    let slots = (0..model.parallel)
        .map(|id| json!({ "id": id, "n_ctx": model.info.context, "is_processing": id < running }));
    Ok(Body::json(&slots.collect::<Vec<_>>()))
}

/// Seconds since 1970 as a date in UTC.
pub(super) fn rfc3339(seconds: u64) -> String {
    // Civil date from a count of days, by eras of 400 years that begin in March.
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right_across_leap_years() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_200, "2024-03-01T00:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(seconds), date);
        }
    }
}
