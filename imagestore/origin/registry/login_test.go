package registry

import (
	"encoding/base64"
	"fmt"
	"testing"

	"drover.io/drover/api"
)

func TestLogin(t *testing.T) {
	both := base64.StdEncoding.EncodeToString([]byte("robot:hunter2:x"))
	config := []byte(fmt.Sprintf(`{"auths":{
		"registry.example.com":{"username":"u","password":"p"},
		"registry.example.com/team":{"username":"team","password":"p"},
		"https://other.example.com:5000/v2/":{"auth":%q},
		"empty.example.com":{},
		"token.example.com":{"identitytoken":"hunter2"},
		"odd.example.com":{"auth":"hunter2!"}}}`, both))
	for ref, want := range map[string][2]string{
		"registry.example.com/disk":        {"u", "p"},
		"registry.example.com/teams/disk":  {"u", "p"},
		"registry.example.com/team/disk:1": {"team", "p"},
		"other.example.com:5000/a/b":       {"robot", "hunter2:x"},
	} {
		user, pass, err := Login(config, Scheme+ref)
		if err != nil || user != want[0] || pass != want[1] {
			t.Errorf("%s: got %q %q: %v", ref, user, pass, err)
		}
	}
	for ref, kind := range map[string]api.Kind{
		"other.example.com/a": api.NotFound, "example.com/a": api.NotFound, "registry.example.com:5000/a": api.NotFound,
		"registry.example.com.evil.example/a": api.NotFound, "empty.example.com/a": api.Invalid,
		"token.example.com/a": api.Invalid, "odd.example.com/a": api.Invalid,
	} {
		_, _, err := Login(config, Scheme+ref)
		fails(t, err, kind, "")
	}
	_, _, err := Login([]byte(`{"auths":["hunter2"]}`), Scheme+"registry.example.com/a")
	fails(t, err, api.Invalid, "no Docker configuration")
}
