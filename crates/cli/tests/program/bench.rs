//! `carat bench`: the fields that tools read, pacing, sequences together.

use serde_json::Value;

use crate::start::{carat, carat_with, refusal};

fn json_lines(text: &str) -> Vec<Value> {
    let lines = text.lines();
    lines.map(|l| serde_json::from_str(l).unwrap()).collect()
}

#[test]
fn bench_prints_the_fields_that_tools_read() {
    let output = carat(&[
        "bench", "-p", "8", "-n", "4", "-d", "0,16", "-r", "2", "-b", "8", "-o", "json", "-t", "2",
    ]);
    let reports = json_lines(&output.stdout);
    let tests: Vec<_> = reports
        .iter()
        .map(|r| r["test"].as_str().unwrap())
        .collect();
    assert_eq!(tests, ["pp8", "tg4", "pp8 @ d16", "tg4 @ d16"]);
    for report in &reports {
        assert_eq!(report["backend"], "cpu");
        assert_eq!(report["threads"], 2);
        assert_eq!(
            report["samples_tokens_per_second"]
                .as_array()
                .unwrap()
                .len(),
            2
        );
        assert!(report["tokens_per_second_median"].as_f64().unwrap() > 0.0);
        assert!(report["bound"]["percent"].as_f64().unwrap() > 0.0);
    }
    assert!(
        carat(&["bench", "-p", "8", "-n", "0", "-r", "1"])
            .stdout
            .starts_with("| model |")
    );
}

#[test]
fn a_paced_bench_runs_one_repetition_for_each_line() {
    let arguments = [
        "bench", "-p", "8", "-n", "0", "-r", "9", "-o", "json", "--paced",
    ];
    let output = carat_with(b"\n\n", &arguments);
    let lines: Vec<Value> = output
        .stdout
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    let [wait, first, again, second, last_wait, report] = lines.as_slice() else {
        panic!("{}", output.stdout);
    };
    for wait in [wait, again, last_wait] {
        assert_eq!(wait["waiting"], "pp8");
    }
    for turn in [first, second] {
        assert!(turn["measured_read_bytes_per_second"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(report["samples_seconds"][0], first["seconds"]);
    assert_eq!(report["samples_seconds"][1], second["seconds"]);
    assert_eq!(report["samples_seconds"].as_array().unwrap().len(), 2);
    assert!(refusal(&arguments).contains("pp8 had its turn"));
}

#[test]
fn bench_times_sequences_that_generate_together() {
    let output = carat(&[
        "bench",
        "-p",
        "8",
        "-n",
        "4",
        "-d",
        "0,40",
        "-r",
        "1",
        "--sequences",
        "1,3",
        "-o",
        "json",
        "--isa",
        "scalar",
    ]);
    let reports = json_lines(&output.stdout);
    let tests: Vec<_> = reports
        .iter()
        .map(|r| {
            (
                r["test"].as_str().unwrap(),
                r["n_sequences"].as_u64().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        tests,
        [
            ("pp8", 1),
            ("tg4", 1),
            ("tg4 x3", 3),
            ("pp8 @ d40", 1),
            ("tg4 @ d40", 1),
            ("tg4 x3 @ d40", 3)
        ]
    );
    // Twelve tokens in the time of one sample.
    let seconds = reports[2]["samples_seconds"][0].as_f64().unwrap();
    let speed = reports[2]["tokens_per_second_median"].as_f64().unwrap();
    assert!((speed * seconds - 12.0).abs() < 1e-6);
}

/// Every operation of the program, and sampling; the trace has their labels.
#[test]
fn bench_profiles_what_a_cpu_computes() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let args = format!(
        "bench -p 0 -n 2 -r 1 -o json -t 2 --profile --trace {}",
        trace.display()
    );
    let args: Vec<&str> = args.split(' ').collect();
    let reports = json_lines(&carat(&args).stdout);
    let phases = reports[0]["profile"].as_array().unwrap();
    let sum = |field: &str| -> f64 { phases.iter().map(|p| p[field].as_f64().unwrap()).sum() };
    assert!((sum("percent_of_time") - 100.0).abs() < 1e-6);
    let ffn = phases.iter().find(|p| p["phase"] == "ffn").unwrap();
    assert!(ffn["bytes"].as_u64().unwrap() > 0 && ffn["microseconds"].as_f64().unwrap() > 0.0);

    let listed = carat(&["inspect", "--program"]).stdout;
    let operations = listed.lines().filter(|l| l.starts_with('L')).count();
    let text = std::fs::read_to_string(&trace).unwrap();
    let trace: Value = serde_json::from_str(&text).unwrap();
    let names = trace["traceEvents"].as_array().unwrap();
    let names: Vec<&str> = names.iter().filter_map(|e| e["name"].as_str()).collect();
    let in_layers = names.iter().filter(|name| name.starts_with('L')).count();
    assert_eq!(in_layers, operations);
    assert!(names.contains(&"L0.attn.q+k+v"), "{names:?}");
    assert_eq!(names.last(), Some(&"sample"));
}

#[test]
fn bench_times_streams_through_the_engine() {
    let args = "bench --streams 2 -n 200 -r 2 --top-p 0.9 -o json -t 2";
    let args: Vec<&str> = args.split(' ').collect();
    let reports = json_lines(&carat(&args).stdout);
    let [plain, wished] = reports.as_slice() else {
        panic!("{reports:?}");
    };
    assert_eq!(plain["test"], "tg200 x2");
    assert_eq!(wished["test"], "tg200 x2, temp 1, top-p 0.9");
    for report in &reports {
        let samples = report["samples_tokens_per_second"].as_array().unwrap();
        assert_eq!(samples.len(), 2);
        let gap = |name: &str| report[name].as_f64().unwrap();
        assert!(0.0 < gap("gap_ms_p50") && gap("gap_ms_p50") <= gap("gap_ms_p99"));
        assert!(gap("gap_ms_p99") <= gap("gap_ms_max"));
    }
    let rate = |report: &Value| report["tokens_per_second_median"].as_f64().unwrap();
    let share = wished["percent_of_plain"].as_f64().unwrap();
    assert!((share - 100.0 * rate(wished) / rate(plain)).abs() < 1e-6);

    let args = "bench --streams 2 --beside 600 -r 1 -o json -t 2";
    let args: Vec<&str> = args.split(' ').collect();
    let reports = json_lines(&carat(&args).stdout);
    let tests: Vec<_> = reports.iter().map(|r| &r["test"]).collect();
    assert_eq!(tests, ["pp600 alone", "pp600 beside x2"]);
    assert!(reports[1]["percent_of_plain"].as_f64().unwrap() > 0.0);

    let told = refusal(&["bench", "--streams", "2", "--beside", "5000"]);
    assert!(told.contains("5002 tokens are more than"), "{told}");
}
