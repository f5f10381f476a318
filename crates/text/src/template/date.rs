//! Dates for templates that tell the model what day it is. English names, UTC, the Gregorian calendar.

use std::fmt::Write;

const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

struct Date {
    year: i64,
    /// From 0.
    month: usize,
    /// From 1.
    day: i64,
    /// From 1.
    day_of_year: i64,
    /// From 0, Sunday.
    weekday: usize,
    second_of_day: i64,
}

impl Date {
    fn at(unix_time: i64) -> Date {
        let days = unix_time.div_euclid(86_400);
        // Count from 1 March of year 0, so that a leap day ends its year, in periods of 400 years.
        let since_march = days + 719_468;
        let (period, day_of_period) = (
            since_march.div_euclid(146_097),
            since_march.rem_euclid(146_097),
        );
        let year_of_period = (day_of_period - day_of_period / 1_460 + day_of_period / 36_524
            - day_of_period / 146_096)
            / 365;
        let day_of_march_year =
            day_of_period - (365 * year_of_period + year_of_period / 4 - year_of_period / 100);
        // Months from March on repeat 31, 30, 31, 30, 31 days: 153 in five months.
        let march_month = (5 * day_of_march_year + 2) / 153;
        let month = (march_month + 2) % 12;
        let year = period * 400 + year_of_period + i64::from(march_month >= 10);
        let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let day_of_year = if march_month >= 10 {
            day_of_march_year - 305
        } else {
            day_of_march_year + 60 + i64::from(is_leap)
        };
        Date {
            year,
            month: month as usize,
            day: day_of_march_year - (153 * march_month + 2) / 5 + 1,
            day_of_year,
            weekday: (days + 4).rem_euclid(7) as usize,
            second_of_day: unix_time.rem_euclid(86_400),
        }
    }
}

/// C's `strftime` for the fields that templates use; an unknown field stays as it is written.
pub(super) fn strftime(unix_time: i64, format: &str) -> String {
    let date = Date::at(unix_time);
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let mut field = characters.next();
        let padded = field != Some('-');
        if !padded {
            field = characters.next();
        }
        let Some(field) = field else {
            text.push_str(if padded { "%" } else { "%-" });
            break;
        };
        write_field(&mut text, &date, field, padded);
    }
    text
}

fn write_field(text: &mut String, date: &Date, field: char, padded: bool) {
    let hour = date.second_of_day / 3_600;
    let number = |value: i64, width: usize| {
        if padded {
            format!("{value:0width$}")
        } else {
            value.to_string()
        }
    };
    let written = match field {
        'Y' => date.year.to_string(),
        'y' => number(date.year.rem_euclid(100), 2),
        'm' => number(date.month as i64 + 1, 2),
        'd' => number(date.day, 2),
        'e' => {
            if padded {
                format!("{:2}", date.day)
            } else {
                date.day.to_string()
            }
        }
        'j' => number(date.day_of_year, 3),
        'H' => number(hour, 2),
        'I' => number((hour + 11) % 12 + 1, 2),
        'M' => number(date.second_of_day / 60 % 60, 2),
        'S' => number(date.second_of_day % 60, 2),
        'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
        'B' => MONTHS[date.month].to_owned(),
        'b' | 'h' => MONTHS[date.month][..3].to_owned(),
        'A' => DAYS[date.weekday].to_owned(),
        'a' => DAYS[date.weekday][..3].to_owned(),
        'F' => format!("{}-{:02}-{:02}", date.year, date.month + 1, date.day),
        'Z' => "UTC".to_owned(),
        'z' => "+0000".to_owned(),
        '%' => "%".to_owned(),
        other => {
            let _ = write!(text, "{}{other}", if padded { "%" } else { "%-" });
            return;
        }
    };
    text.push_str(&written);
}

#[cfg(test)]
mod tests {
    use super::strftime;

    /// Checked with Python's `datetime`.
    #[test]
    fn days_agree_with_the_calendar() {
        let days = [
            (0, "Thursday 1970-01-01 001"),
            (951_782_400, "Tuesday 2000-02-29 060"),
            (1_735_603_200, "Tuesday 2024-12-31 366"),
            (4_107_542_400, "Monday 2100-03-01 060"),
            (-86_400, "Wednesday 1969-12-31 365"),
        ];
        for (unix_time, expected) in days {
            assert_eq!(strftime(unix_time, "%A %F %j"), expected);
        }
    }

    #[test]
    fn fields_are_written_as_c_does() {
        let at = 1_767_268_805; // 2026-01-01 12:00:05
        assert_eq!(
            strftime(at, "%d %b %Y, %I:%M:%S %p"),
            "01 Jan 2026, 12:00:05 PM"
        );
        assert_eq!(strftime(at, "%-d %B %y|%e|%H|%%"), "1 January 26| 1|12|%");
        assert_eq!(strftime(at, "%Q %-"), "%Q %-");
    }

    #[test]
    fn no_time_and_no_format_panics() {
        for unix_time in [i64::MIN, i64::MAX] {
            strftime(unix_time, "%A %B %j %F %I");
        }
        assert_eq!(strftime(0, "%"), "%");
    }
}
