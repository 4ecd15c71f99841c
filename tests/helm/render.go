// Renders the templates of a chart as Helm would, with the functions that our chart uses: standard
// input has the values as JSON.
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"text/template"
)

func main() {
	var about map[string]any
	if err := json.NewDecoder(os.Stdin).Decode(&about); err != nil {
		log.Fatal(err)
	}
	number := func(it any) int64 {
		value, isNumber := it.(float64)
		if !isNumber {
			log.Fatalf("%v is no number", it)
		}
		return int64(value)
	}
	functions := template.FuncMap{
		"quote":    func(it any) string { return fmt.Sprintf("%q", fmt.Sprint(it)) },
		"toString": func(it any) string { return fmt.Sprint(it) },
		"add":      func(one any, other int64) int64 { return number(one) + other },
		"default": func(fallback, it any) any {
			if it == nil || it == "" {
				return fallback
			}
			return it
		},
		"toJson": func(it any) (string, error) {
			text, err := json.Marshal(it)
			return string(text), err
		},
	}
	files, err := filepath.Glob(filepath.Join(os.Args[1], "templates", "*.yaml"))
	if err != nil || len(files) == 0 {
		log.Fatal("no templates: ", err)
	}
	for _, file := range files {
		it, err := template.New(filepath.Base(file)).Funcs(functions).Option("missingkey=error").ParseFiles(file)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("---")
		if err := it.Execute(os.Stdout, about); err != nil {
			log.Fatal(err)
		}
	}
}
