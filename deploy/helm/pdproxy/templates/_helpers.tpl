{{- define "pdproxy.name" -}}
{{- if contains "pdproxy" .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-pdproxy" .Release.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "pdproxy.selector" -}}
app.kubernetes.io/name: pdproxy
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pdproxy.labels" -}}
{{ include "pdproxy.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- end }}

{{- define "pdproxy.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "pdproxy.name" .) }}
{{- end }}

{{- define "pdproxy.image" -}}
{{- with .Values.image }}{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}{{ end }}
{{- end }}

{{- define "pdproxy.adminSecret" -}}
{{- .Values.adminToken.existingSecret | default (printf "%s-admin" (include "pdproxy.name" .)) }}
{{- end }}

{{/*
The configuration of the pods, as TOML: the value `config` with the addresses and the token file of
a pod. Comments of the file get lost. `pdproxy check` checks the keys, the chart only the syntax
and the keys that it reads.
*/}}
{{- define "pdproxy.config" -}}
{{- $c := fromToml .Values.config }}
{{- with $c.Error }}{{ fail (printf "values: config: %s" .) }}{{ end }}
{{- range list "server" "admin" "fleet" }}
{{- if not (hasKey $c .) }}{{ $_ := set $c . dict }}{{ end }}
{{- end }}
{{- $_ := set $c.server "listen" (include "pdproxy.everywhere" (list $c "server" "127.0.0.1:8080")) }}
{{- $_ := set $c.admin "listen" (include "pdproxy.everywhere" (list $c "admin" "127.0.0.1:9090")) }}
{{- $_ := set $c.admin "token_file" "/etc/pdproxy/admin/token" }}
{{- if dig "epp" "listen" "" $c }}
{{- $_ := set $c.epp "listen" (include "pdproxy.everywhere" (list $c "epp" "")) }}
{{- end }}
{{- if dig "fleet" "lease" "name" "" $c }}
{{- $_ := set $c.fleet "listen" (include "pdproxy.everywhere" (list $c "fleet" "127.0.0.1:8331")) }}{{/* the coordinators of the other pods connect there */}}
{{- end }}
{{- if not (or (hasKey $c.fleet "node_id") (dig "fleet" "workers" 0 $c)) }}
{{- $_ := set $c.fleet "node_id" -1 }}{{/* each pod mints different ids */}}
{{- end }}
{{- toToml $c }}
{{- end }}

{{/* The listen address of a section, on all addresses of the pod: (list CONFIG SECTION DEFAULT). */}}
{{- define "pdproxy.everywhere" -}}
{{- $listen := dig (index . 1) "listen" (index . 2) (index . 0) | toString }}
{{- if not (regexMatch ":[0-9]+$" $listen) }}
{{- fail (printf "values: config: %s.listen is %q; it must be HOST:PORT" (index . 1) $listen) }}
{{- end }}
{{- if hasPrefix "[::]:" $listen }}{{ $listen }}{{ else }}0.0.0.0:{{ regexFind "[0-9]+$" $listen }}{{ end }}
{{- end }}

{{/* The port of the listen address of a section, or nothing: (list CONTEXT SECTION). */}}
{{- define "pdproxy.port" -}}
{{- include "pdproxy.config" (index . 0) | fromToml | dig (index . 1) "listen" "" | regexFind "[0-9]+$" }}
{{- end }}

{{/* A duration in whole seconds: (list KEY VALUE). */}}
{{- define "pdproxy.seconds" -}}
{{- $v := index . 1 }}
{{- if regexMatch "^[0-9]+s$" $v }}{{ trimSuffix "s" $v }}
{{- else if regexMatch "^[0-9]+m$" $v }}{{ mul 60 (trimSuffix "m" $v | int) }}
{{- else }}{{ fail (printf "values: config: %s = %q is neither whole seconds nor whole minutes; set terminationGracePeriodSeconds" (index . 0) $v) }}{{ end }}
{{- end }}

{{/* The time that the kubelet must wait before it kills the proxy (docs/howto/deploy.md). */}}
{{- define "pdproxy.grace" -}}
{{- if .Values.terminationGracePeriodSeconds }}{{ .Values.terminationGracePeriodSeconds | int }}
{{- else }}
{{- $c := include "pdproxy.config" . | fromToml }}
{{- $drain := include "pdproxy.seconds" (list "server.drain_timeout" (dig "server" "drain_timeout" "30s" $c)) | int }}
{{- $cleanup := include "pdproxy.seconds" (list "timeouts.cleanup" (dig "timeouts" "cleanup" "5s" $c)) | int }}
{{- $calls := ternary 4 2 (gt (dig "fleet" "workers" 0 $c | int) 0) }}
{{- add .Values.preStopSeconds $drain (mul $calls $cleanup) 10 }}
{{- end }}
{{- end }}
