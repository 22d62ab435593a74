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

{{/* The configuration file of the pods: the value, and the tables that pods need and the value does not have. */}}
{{- define "pdproxy.file" -}}
{{- $c := fromToml .Values.config }}
{{- with $c.Error }}{{ fail (printf "values: config: %s" .) }}{{ end }}
{{- .Values.config | trimSuffix "\n" }}
{{- if not (hasKey $c "server") }}

[server] # added by the chart
listen = "0.0.0.0:8080"
{{- end }}
{{- if not (hasKey $c "admin") }}

[admin] # added by the chart
listen = "0.0.0.0:9090"
token_file = "/etc/pdproxy/admin/token"
{{- end }}
{{- if not (hasKey $c "fleet") }}

[fleet] # added by the chart
node_id = -1 # each pod gets its own part of the ids
{{- end }}
{{ end }}

{{/* The configuration as a value. `pdproxy check` checks the keys, the chart only the syntax and what it reads. */}}
{{- define "pdproxy.config" -}}
{{- $c := include "pdproxy.file" . | fromToml }}
{{- if not (dig "admin" "token_file" "" $c) }}
{{- fail "values: config: admin.token_file is missing; add token_file = \"/etc/pdproxy/admin/token\" to [admin], or remove [admin]: then the chart adds it" }}
{{- end }}
{{- toJson $c }}
{{- end }}

{{/* The port of the listen address of a section: (list CONTEXT SECTION EXAMPLE). */}}
{{- define "pdproxy.port" -}}
{{- $c := include "pdproxy.config" (index . 0) | fromJson }}
{{- $listen := dig (index . 1) "listen" "" $c }}
{{- if not (regexMatch "^(0\\.0\\.0\\.0|\\[::\\])?:[0-9]+$" $listen) }}
{{- fail (printf "values: config: %s.listen is %q; it must be like %q, so that the kubelet and other pods reach the port" (index . 1) $listen (index . 2)) }}
{{- end }}
{{- regexFind "[0-9]+$" $listen }}
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
{{- $c := include "pdproxy.config" . | fromJson }}
{{- $drain := include "pdproxy.seconds" (list "server.drain_timeout" (dig "server" "drain_timeout" "30s" $c)) | int }}
{{- $cleanup := include "pdproxy.seconds" (list "timeouts.cleanup" (dig "timeouts" "cleanup" "5s" $c)) | int }}
{{- $calls := ternary 4 2 (gt (dig "fleet" "workers" 0 $c | int) 0) }}
{{- add .Values.preStopSeconds $drain (mul $calls $cleanup) 10 }}
{{- end }}
{{- end }}
