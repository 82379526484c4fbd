package api

import "embed"

// CRDs holds the CustomResourceDefinitions, one YAML file each in crds/, made from the types by `make generate`.
//
//go:embed crds/*.yaml
var CRDs embed.FS
