package registry

import (
	"encoding/json"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"

	"drover.io/drover/api"
)

// Login returns the account for an image from a Docker configuration (the .dockerconfigjson of a Secret of type
// kubernetes.io/dockerconfigjson): the entry with the longest match of registry and folders. Messages repeat nothing of
// the configuration.
func Login(config []byte, ref string) (username, password string, err error) {
	parsed, err := parseReference(ref, false)
	if err != nil {
		return "", "", err
	}
	var file struct {
		Auths map[string]json.RawMessage `json:"auths"`
	}
	if err := json.Unmarshal(config, &file); err != nil {
		return "", "", api.Errorf(api.Invalid, "the Secret's .dockerconfigjson is no Docker configuration")
	}
	host, image := parsed.Context().RegistryStr(), parsed.Context().Name()+"/"
	best, found := -1, json.RawMessage(nil)
	for key, entry := range file.Auths {
		if _, rest, ok := strings.Cut(key, "://"); ok {
			key = rest
		}
		key = strings.TrimRight(key, "/")
		if at, path, _ := strings.Cut(key, "/"); at == host && (path == "v1" || path == "v2") {
			key = host // docker login writes this form for some registries
		}
		if strings.HasPrefix(image, key+"/") && len(key) > best {
			best, found = len(key), entry
		}
	}
	if best < 0 {
		return "", "", api.Errorf(api.NotFound, "the Secret's .dockerconfigjson has no credentials for %s", host)
	}
	var auth authn.AuthConfig
	if err := json.Unmarshal(found, &auth); err != nil || auth.Username == "" || auth.Password == "" {
		return "", "", api.Errorf(api.Invalid, "the Secret's .dockerconfigjson has no username and password for %s", host)
	}
	return auth.Username, auth.Password, nil
}
