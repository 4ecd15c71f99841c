//! Markdown to HTML: headings with anchors, a table of contents, tabs, and the words to search.
//!
//! Tabs are written so that a plain Markdown reader shows them well, too: between `<!-- tabs -->`
//! and `<!-- end -->`, each begins with its name in bold on a line of its own.

use pulldown_cmark::{CowStr, Event, Options, Parser, Tag, TagEnd, html};

const TABS: &str = "<!-- tabs -->\n";
const END: &str = "<!-- end -->\n";

/// A page as HTML.
#[derive(Debug, Default)]
pub struct Rendered {
    pub html: String,
    pub sections: Vec<Section>,
}

/// A heading and the words below it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Section {
    /// 1 to 6; 0: before the first heading.
    pub level: u8,
    pub anchor: String,
    pub title: String,
    pub words: String,
}

impl Rendered {
    /// Renders a page.
    pub fn of(markdown: &str) -> Self {
        let mut page = Self::default();
        let mut groups = 0;
        let mut rest = markdown;
        while let Some((before, after)) = rest.split_once(TABS) {
            page.render(before);
            let (tabs, after) = after.split_once(END).unwrap_or((after, ""));
            groups += 1;
            page.render_tabs(tabs, groups);
            rest = after;
        }
        page.render(rest);
        page
    }

    /// Radio buttons, so that tabs work without scripts.
    fn render_tabs(&mut self, tabs: &str, group: usize) {
        self.html.push_str("<div class=\"tabs\">\n");
        for (number, (name, text)) in parts(tabs).into_iter().enumerate() {
            let id = format!("tab-{group}-{number}");
            let checked = if number == 0 { " checked" } else { "" };
            let name = escape(name);
            self.html.push_str(&format!(
                "<input type=\"radio\" name=\"tabs-{group}\" id=\"{id}\" value=\"{name}\"{checked}>\
                 <label for=\"{id}\">{name}</label><div class=\"tab\">\n"
            ));
            self.render(text);
            self.html.push_str("</div>\n");
        }
        self.html.push_str("</div>\n");
    }

    fn render(&mut self, markdown: &str) {
        let mut events: Vec<_> = Parser::new_ext(markdown, Options::ENABLE_TABLES).collect();
        let mut heading = None;
        for at in 0..events.len() {
            match &mut events[at] {
                Event::Start(Tag::Heading { level, .. }) => {
                    heading = Some(at);
                    let section = Section { level: *level as u8, ..Section::default() };
                    self.sections.push(section);
                }
                Event::End(TagEnd::Heading(_)) => {
                    let anchor = self.end_heading();
                    let begin = heading.take().and_then(|it| events.get_mut(it));
                    if let Some(Event::Start(Tag::Heading { id, .. })) = begin {
                        *id = Some(CowStr::from(anchor));
                    }
                }
                Event::Text(text) | Event::Code(text) => {
                    self.say(text, heading.is_some());
                }
                Event::End(_) | Event::SoftBreak | Event::HardBreak => {
                    self.say(" ", heading.is_some());
                }
                _ => (),
            }
        }
        html::push_html(&mut self.html, events.into_iter());
    }

    fn say(&mut self, text: &str, is_heading: bool) {
        if self.sections.is_empty() {
            self.sections.push(Section::default());
        }
        if let Some(section) = self.sections.last_mut() {
            if is_heading { &mut section.title } else { &mut section.words }.push_str(text);
        }
    }

    fn end_heading(&mut self) -> String {
        let Some(section) = self.sections.last_mut() else { return String::new() };
        section.anchor = anchor(&section.title);
        section.anchor.clone()
    }
}

/// The tabs of a group: names and texts.
fn parts(tabs: &str) -> Vec<(&str, &str)> {
    let mut parts: Vec<(&str, usize, usize)> = Vec::new();
    let mut at = 0;
    for line in tabs.split_inclusive('\n') {
        let name = line.trim().strip_prefix("**").and_then(|it| it.strip_suffix("**"));
        if let Some(name) = name {
            if let Some(last) = parts.last_mut() {
                last.2 = at;
            }
            parts.push((name, at + line.len(), tabs.len()));
        }
        at += line.len();
    }
    parts.into_iter().map(|(name, from, to)| (name, &tabs[from..to])).collect()
}

/// A heading's words in lower case, with hyphens.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|it| it.is_alphanumeric() || " -_".contains(*it));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

/// Text as HTML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_can_be_linked_and_tables_are_tables() {
        let page = Rendered::of(
            "# One\n\nwords\n\n## A `code_word`, and more\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
        );
        assert!(page.html.contains("<h2 id=\"a-code_word-and-more\">"), "{}", page.html);
        assert!(page.html.contains("<td>2</td>"), "{}", page.html);
        let sections: Vec<_> =
            page.sections.iter().map(|it| (it.level, &*it.title, it.words.trim())).collect();
        assert_eq!(sections, [(1, "One", "words"), (2, "A code_word, and more", "a b  1 2")]);
    }

    #[test]
    fn tabs_are_radio_buttons_and_what_follows_is_not_in_them() {
        let page = Rendered::of(
            "a\n\n<!-- tabs -->\n**curl**\n\n```sh\none\n```\n\n**Go**\n\ntwo\n<!-- end -->\n\nb\n",
        );
        let html = page.html.replace('\n', "");
        assert!(html.contains("value=\"curl\" checked><label for=\"tab-1-0\">curl"), "{html}");
        assert!(html.contains("value=\"Go\"><label for=\"tab-1-1\">Go"), "{html}");
        assert!(html.ends_with("<p>two</p></div></div><p>b</p>"), "{html}");
    }
}
