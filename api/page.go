package api

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"fmt"
	"html"
	"regexp"
	"strings"
)

//go:embed docs.css
var docsCSS string

// pages is what is made of the document for people.
type pages struct {
	html []byte
	csp  string
}

// makePages turns the Markdown into one page that needs nothing from anywhere:
// its policy allows its own style and no script, image, font or connection.
func makePages(*document) (pages, error) {
	md, err := Markdown()
	if err != nil {
		return pages{}, err
	}
	p := &page{}
	for block := range strings.SplitSeq(string(md), "\n\n") {
		p.block(block)
	}
	p.flushCode()
	sum := sha256.Sum256([]byte(docsCSS))
	out := pages{csp: "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) +
		"'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"}
	var b bytes.Buffer
	fmt.Fprintf(&b, "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"+
		"<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>boxed API</title>\n"+
		"<style>%s</style>\n</head>\n<body>\n<nav aria-label=\"Contents\">\n%s</nav>\n<main>\n%s</main>\n</body>\n</html>\n",
		docsCSS, p.nav.String(), p.body.String())
	out.html = b.Bytes()
	return out, nil
}

// page reads the subset of Markdown that the document and the renderer use:
// headings, paragraphs, lists, tables, fenced code, anchors and inline marks.
// Everything is escaped.
type page struct {
	nav, body bytes.Buffer
	anchor    string // for the next heading
	code      []string
	inCode    bool
}

var (
	anchorLine = regexp.MustCompile(`^<a id="([A-Za-z0-9_-]+)"></a>$`)
	codeSpan   = regexp.MustCompile("`([^`]+)`")
	strong     = regexp.MustCompile(`\*\*([^*]+)\*\*`)
	emphasis   = regexp.MustCompile(`\*([^* ][^*]*)\*`)
	link       = regexp.MustCompile(`\[([^\]]+)\]\((#[A-Za-z0-9_-]+)\)`)
	notSlug    = regexp.MustCompile(`[^a-z0-9]+`)
)

func (p *page) block(s string) {
	if p.inCode || strings.HasPrefix(s, "```") {
		p.fenced(s)
		return
	}
	s = strings.Trim(s, "\n")
	switch {
	case s == "":
	case anchorLine.MatchString(s):
		p.anchor = anchorLine.FindStringSubmatch(s)[1]
	case strings.HasPrefix(s, "#"):
		p.heading(s)
	case strings.HasPrefix(s, "|"):
		p.table(strings.Split(s, "\n"))
	case strings.HasPrefix(s, "- "):
		p.body.WriteString("<ul>\n")
		for item := range strings.SplitSeq("\n"+s, "\n- ") {
			if item != "" {
				p.body.WriteString("<li>" + inline(item) + "</li>\n")
			}
		}
		p.body.WriteString("</ul>\n")
	default:
		p.body.WriteString("<p>" + inline(s) + "</p>\n")
	}
}

// fenced collects code, which may have empty lines.
func (p *page) fenced(s string) {
	p.code = append(p.code, s)
	p.inCode = !strings.HasSuffix(strings.TrimSpace(s), "```") || strings.TrimSpace(s) == "```"
	if !p.inCode {
		p.flushCode()
	}
}

func (p *page) flushCode() {
	if len(p.code) == 0 {
		return
	}
	text := strings.TrimSpace(strings.Join(p.code, "\n\n"))
	_, text, _ = strings.Cut(text, "\n")
	text = strings.TrimSuffix(strings.TrimSuffix(text, "```"), "\n")
	p.body.WriteString("<pre><code>" + html.EscapeString(text) + "</code></pre>\n")
	p.code = nil
}

func (p *page) heading(s string) {
	text := strings.TrimLeft(s, "#")
	level := len(s) - len(text)
	text = strings.TrimSpace(text)
	id := p.anchor
	if id == "" {
		id = strings.Trim(notSlug.ReplaceAllString(strings.ToLower(text), "-"), "-")
	}
	p.anchor = ""
	fmt.Fprintf(&p.body, "<h%d id=\"%s\"><a href=\"#%s\">%s</a></h%d>\n", level, id, id, inline(text), level)
	if level == 2 || level == 3 {
		fmt.Fprintf(&p.nav, "<a class=\"l%d\" href=\"#%s\">%s</a>\n", level, id, inline(text))
	}
}

func (p *page) table(lines []string) {
	p.body.WriteString("<div class=\"wide\"><table>\n")
	for i, line := range lines {
		if i == 1 {
			continue // the rule
		}
		cell := "td"
		if i == 0 {
			cell = "th"
		}
		line = strings.ReplaceAll(strings.Trim(line, "| "), `\|`, "\x00")
		p.body.WriteString("<tr>")
		for c := range strings.SplitSeq(line, " | ") {
			c = strings.ReplaceAll(strings.TrimSpace(strings.Trim(c, "|")), "\x00", "|")
			p.body.WriteString("<" + cell + ">" + inline(c) + "</" + cell + ">")
		}
		p.body.WriteString("</tr>\n")
	}
	p.body.WriteString("</table></div>\n")
}

// inline escapes text and then marks code, which nothing else touches, strong,
// emphasis and links within the page.
func inline(s string) string {
	s = html.EscapeString(strings.ReplaceAll(s, "\n", " "))
	var code []string
	s = codeSpan.ReplaceAllStringFunc(s, func(m string) string {
		code = append(code, "<code>"+m[1:len(m)-1]+"</code>")
		return fmt.Sprintf("\x01%d\x02", len(code)-1)
	})
	s = strong.ReplaceAllString(s, "<strong>$1</strong>")
	s = emphasis.ReplaceAllString(s, "<em>$1</em>")
	s = link.ReplaceAllString(s, `<a href="$2">$1</a>`)
	for i, c := range code {
		s = strings.Replace(s, fmt.Sprintf("\x01%d\x02", i), c, 1)
	}
	return s
}
